"""Shares of the tokens of a long step: which rows they are, and what is recorded of a seam."""

import pytest
import torch

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange import prefill, sum_ranks
from dsv4.ops.exchange.prefill import PartialSum
from dsv4.ops.exchange.token_share import WHOLE, TokenShare, share_of
from dsv4.ops.hyper_connection import prefill as hc
from tests.ops.cases import normal
from tests.ops.exchange.meta import MOST, WIDTH, launches, peers, recording, shared
from tests.ops.hyper_connection.meta import arguments
from tests.ops.recorded import HOPPER, assert_serves_shorter_chunks, shape_at
from tests.ptx.nvrtc import run_recorded

CPU = torch.device("cpu")
TOKENS = (9, 16, 17, 100, 511, 512)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_have_room_for_all_tokens_and_are_as_large(ranks: int) -> None:
    for tokens in TOKENS:
        share = TokenShare(ranks - 1, ranks)
        assert share.rows(tokens) == 16 * share.tiles(tokens)
        assert 0 <= ranks * share.rows(tokens) - tokens < 16 * ranks
        assert WHOLE.rows(tokens) == tokens


def test_a_traced_step_and_a_lone_rank_have_all_tokens() -> None:
    view = peers(1, 4)
    assert share_of(recording(MOST, view)) == TokenShare(1, 4)
    assert share_of(recording(MOST, None)) == WHOLE
    assert share_of(Recording(HOPPER, MOST, None, view, traced=True)) == WHOLE


def seams(view_rank: int, tokens: int = MOST, whole: bool = False) -> Recording:
    found = Recording(HOPPER, tokens, None, peers(view_rank, 4), whole)
    given = arguments("hc_seam", tokens, 4, WIDTH)
    hc.hc_seam(found, shared(found), *given[1:])
    hc.hc_post(found, shared(found), *given[1:4])
    hc.hc_head(found, *arguments("hc_head", tokens, 4, WIDTH))
    return found


KERNELS = ["sum_ranks", "hc_mix_many", "hc_finish", "sum_ranks", "hc_post", "hc_mix_many"]


def test_ranks_meet_behind_what_they_write_for_each_other() -> None:
    found = seams(3)
    own = [one for one in launches(found) if "owner" in one.arguments]
    assert [one.signature.kernel for one in own] == [*KERNELS, "hc_finish"]
    assert {one.arguments["owner"] for one in own} == {3}
    assert {dict(one.shape.kernel.defines)["OWNERS"] for one in own} == {4}
    meetings = [found.items[index - 1] for index in found.meetings]
    names = [one.signature.kernel for one in meetings if isinstance(one, Launch)]
    assert [name for name in names if name != "prefill_linear"] == ["hc_finish"] * 2
    assert len(names) == 4
    peers_of = found.peers
    assert peers_of is not None
    for finish in (one for one in own if one.signature.kernel == "hc_finish"):
        assert finish.arguments["peers"] is peers_of.table_P
        x = finish.arguments["x"]
        assert isinstance(x, torch.Tensor)
        assert found.placed[storage_key(x)] is peers_of.inputs_TE


def test_whole_seams_are_those_of_a_lone_rank() -> None:
    whole = [one for one in launches(seams(2, whole=True)) if "owner" in one.arguments]
    assert [one.signature.kernel for one in whole] == [*KERNELS, "hc_finish"]
    for one in whole:
        assert one.arguments["owner"] == 0
        assert "OWNERS" not in dict(one.shape.kernel.defines)
        assert one.signature.kernel == "sum_ranks" or one.arguments.get("peers") is None


def test_shares_serve_shorter_chunks_and_sum_as_whole_seams_do() -> None:
    assert_serves_shorter_chunks(lambda tokens: launches(seams(1, tokens)), MOST)
    for one, two in zip(launches(seams(1)), launches(seams(1, whole=True)), strict=True):
        for tokens in TOKENS:
            assert splits_of(one, tokens) == splits_of(two, tokens)


def splits_of(launch: Launch, tokens: int) -> int | None:
    shape = shape_at(launch, tokens)
    assert isinstance(shape, Shape)
    return dict(shape.kernel.defines).get("SPLITS")


@pytest.mark.slow
@pytest.mark.parametrize("width", [12, 5])
def test_every_rank_adds_the_rows_of_its_tokens_and_no_others(width: int) -> None:
    """``sum_ranks``, executed on the CPU."""
    ranks, most = 4, 200
    parts = [normal(most, width, seed=rank) for rank in range(ranks)]
    expected = sum_ranks(parts, torch.bfloat16)
    # What kernels reach by addresses is in one piece.
    table = 3 * ranks + 3
    memory = torch.zeros(table + 1 + ranks * most * width // 2, dtype=torch.int64)
    rows = memory[table + 1 :].view(torch.float32).view(ranks, most, width)
    rows.copy_(torch.stack(parts))
    memory[ranks + 3 : 2 * ranks + 3] = torch.tensor([part.data_ptr() for part in rows])
    for tokens in (9, 33, most):
        written = torch.zeros(most, dtype=torch.int64)
        for rank in range(ranks):
            view = peers(rank, ranks, width)
            found = Recording(Target(CPU, "sm_90a", 132), most, None, view)
            y_TE = PartialSum(0, found.empty((most, width), torch.float32))
            prefill.sum_of(found, y_TE, share_of(found))
            (launch,) = found.items
            assert isinstance(launch, Launch)
            sums = torch.full((most, width), 7.0, dtype=torch.bfloat16)
            run_recorded(launch, "sm_90a", {"peers": memory[:table], "y": sums}, tokens)
            own = (sums != 7).any(1)
            assert torch.equal(sums[own], expected[own])
            assert torch.equal(own, torch.arange(most) // 16 % ranks == rank) or tokens < most
            written += own
        assert written.tolist() == [1] * tokens + [0] * (most - tokens)
