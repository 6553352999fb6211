"""What ranks record: which kernel pushes and which polls, where the words lie and how they are told
apart, and which partial results are copied.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.workspace import lay_out
from dsv4.ops.exchange import decode, prefill
from dsv4.ops.exchange.known_words import check_known, push_known
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.hyper_connection import decode as hc_decode
from dsv4.peers import LOGITS_EXCHANGE, MOST_EXCHANGES, InboxLayout
from tests.ops.exchange.meta import (
    MOST,
    RANKS,
    VOCABULARY,
    WIDTH,
    experts,
    head,
    launches,
    peers,
    recording,
    row_parallel,
    shared,
)
from tests.ops.hyper_connection.meta import arguments
from tests.ops.moe.meta_layer import FLASH
from tests.ops.recorded import assert_serves_shorter_chunks, meta, shape_at

TOKENS = (1, 3, 8)


def exchange(launch: Launch) -> tuple[int, int, int]:
    """RANKS, first word and number of what a kernel pushes or polls."""
    slot, number = launch.arguments["slot"], launch.arguments["exchange"]
    assert isinstance(slot, int)
    assert isinstance(number, int)
    return dict(launch.shape.kernel.defines)["RANKS"], slot, number


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_seam_looks_for_words_early_where_the_number_of_the_step_is_old(tokens: int) -> None:
    for begins, early in ((False, 1), (True, 0)):
        found = recording(tokens, peers(0, 2))
        if begins:
            decode.next_step(found)
        hc_decode.hc_seam(found, row_parallel(found), *arguments("hc_seam", tokens, 4, WIDTH)[1:])
        (mix,) = (one for one in launches(found) if one.signature.kernel == "hc_mix")
        assert dict(mix.shape.kernel.defines).get("SETTLED", 0) == early


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_parts_of_a_sum_lie_side_by_side_where_the_consumers_poll(ranks: int, tokens: int) -> None:
    """Attention's sum in the first half of the inbox, the experts' in the second."""
    for rank in range(ranks):
        view = peers(rank, ranks)
        found = recording(tokens, view)
        attended, mixed = row_parallel(found), experts(found, FLASH)
        assert attended == WordSum(0, tokens, WIDTH)
        assert mixed == WordSum(1, tokens, WIDTH)
        given = arguments("hc_seam", tokens, 4, WIDTH)
        for result in (attended, mixed):
            hc_decode.hc_seam(found, result, *given[1:])
            hc_decode.hc_post(found, result, *given[1:4])
            summed = decode.summed(found, result)
            assert (summed.dtype, tuple(summed.shape)) == (torch.bfloat16, (tokens, WIDTH))
        pushed = launches(found)[:2]
        assert [launch.signature.kernel for launch in pushed] == ["decode_linear", "moe_decode"]
        own = rank * view.layout.rank_words
        second = ranks * view.layout.rank_words
        assert view.layout.rank_words >= tokens * WIDTH
        assert [exchange(launch) for launch in pushed] == [
            (ranks, own, 0),
            (ranks, second + own, 1),
        ]
        polled = [launch for launch in launches(found)[2:] if "exchange" in launch.arguments]
        names = ["hc_mix", "hc_post", "sum_words"]
        assert [launch.signature.kernel for launch in polled] == names * 2
        assert [exchange(launch) for launch in polled[:3]] == [(ranks, 0, 0)] * 3
        assert [exchange(launch) for launch in polled[3:]] == [(ranks, second, 1)] * 3
        assert {launch.arguments["rank_words"] for launch in polled} == {view.layout.rank_words}
        assert all(launch.arguments["peers"] is view.table_P for launch in (*pushed, *polled))
        # The result is nowhere else: neither written by who pushes nor read by who polls.
        assert [launch.arguments.get("y", launch.arguments.get("y_TE")) for launch in pushed] == [
            None,
            None,
        ]
        assert [launch.arguments["y"] for launch in polled if "streams" in launch.arguments] == [
            None
        ] * 4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 250, 16 * 8])
def test_logits_have_words_of_their_own_behind_both_slots(ranks: int, vocabulary: int) -> None:
    for tokens in TOKENS:
        for rank in range(ranks):
            view = peers(rank, ranks, vocabulary=vocabulary)
            found = recording(tokens, view)
            # Ranks with fewer rows leave the last of their words as they are.
            rows = view.layout.head_rows - (16 if rank % 2 else 0)
            logits_TV = decode.gather_logits(found, head(found, max(rows, 16)))
            assert (logits_TV.dtype, tuple(logits_TV.shape)) == (
                torch.float32,
                (tokens, vocabulary),
            )
            pushed, gathered = launches(found)
            share = view.layout.rank_words
            behind = 2 * ranks * share
            assert share >= tokens * view.layout.head_rows
            assert exchange(pushed) == (ranks, behind + rank * share, LOGITS_EXCHANGE)
            assert exchange(gathered) == (ranks, behind, LOGITS_EXCHANGE)
            assert gathered.arguments["rank_words"] == share
            assert gathered.arguments["width"] == vocabulary
            blocks, down, _ = gathered.shape.grid
            assert (blocks * gathered.shape.threads >= vocabulary, down) == (True, tokens)
            assert behind + ranks * share <= view.layout.words


def test_exchanges_take_the_slots_in_turn_and_never_the_number_of_the_logits() -> None:
    found = recording(1, peers(0, 2))
    sums = [row_parallel(found) for _ in range(6)]
    assert [words.exchange for words in sums if isinstance(words, WordSum)] == list(range(6))
    layout = InboxLayout(2, WIDTH, VOCABULARY)
    assert {layout.slot(number) for number in range(0, LOGITS_EXCHANGE, 2)} == {0}
    odd = {layout.slot(number) for number in range(1, LOGITS_EXCHANGE, 2)}
    assert odd == {2 * layout.rank_words}
    assert LOGITS_EXCHANGE == MOST_EXCHANGES - 1


def test_a_lone_rank_records_no_words() -> None:
    found = recording(3, None)
    result = row_parallel(found)
    given = arguments("hc_seam", 3, 4, WIDTH)
    hc_decode.hc_seam(found, result, *given[1:])
    assert decode.summed(found, result) is result
    assert isinstance(experts(found, FLASH), Tensor)
    logits_TV = head(found, 512)
    assert decode.gather_logits(found, logits_TV) is logits_TV
    decode.next_step(found)
    names = [launch.signature.kernel for launch in launches(found)]
    assert names == ["decode_linear", "hc_mix", "hc_finish", "moe_decode", "decode_linear"]
    for launch in launches(found):
        assert "RANKS" not in dict(launch.shape.kernel.defines)
        assert launch.arguments.get("peers") is None
        assert (launch.arguments.get("slot", 0), launch.arguments.get("exchange", 0)) == (0, 0)


@pytest.mark.parametrize("tokens", TOKENS)
def test_known_words_lie_where_those_of_a_product_do(tokens: int) -> None:
    """And every one of them is pushed and checked."""
    for rank in range(4):
        view = peers(rank, 4)
        found, other = recording(tokens, view), recording(tokens, view)
        for _ in range(2):
            words = push_known(found, tokens, WIDTH)
            check_known(found, words, meta(1, dtype=torch.int32))
            decode.summed(other, row_parallel(other))
        pairs = zip(launches(found), launches(other), strict=True)
        assert all(exchange(one) == exchange(two) for one, two in pairs)
        push, check = launches(found)[-2:]
        assert push.arguments["rank"] == rank
        count = tokens * WIDTH
        for launch, values in ((push, 1), (check, 2)):
            assert launch.arguments["count"] == count
            assert values * launch.shape.threads * launch.shape.grid[0] >= count


def test_a_step_of_logits_alone_gets_a_number() -> None:
    view = peers(1, 2)
    found = recording(1, view)
    decode.next_step(found)
    (launch,) = launches(found)
    assert launch.signature.kernel == "next_step"
    assert launch.arguments["step"] is view.step_4


@pytest.mark.parametrize("ranks", RANKS)
def test_a_chunk_adds_what_lies_in_the_memory_of_all_ranks(ranks: int) -> None:
    """Partial results take two slots in turn; nothing of them is in the workspace."""
    view = peers(ranks - 1, ranks)
    found = recording(MOST, view)
    for exchange in range(3):
        result = shared(found)
        assert isinstance(result, prefill.PartialSum)
        assert result.exchange == exchange
        assert (result.own_TE.dtype, tuple(result.own_TE.shape)) == (torch.float32, (MOST, WIDTH))
        assert found.meetings.pop() == len(found.items)
        memory = found.placed[storage_key(result.own_TE)]
        assert memory.storage_offset() == exchange % 2 * MOST * WIDTH
        assert storage_key(memory) == storage_key(view.partials_STE)
        summed = prefill.summed(found, result)
        assert (summed.dtype, tuple(summed.shape)) == (torch.bfloat16, (MOST, WIDTH))
        adding = launches(found)[-1]
        assert adding.signature.kernel == "sum_ranks"
        assert adding.shape.kernel.defines == (("RANKS", ranks),)
        assert adding.arguments["peers"] is view.table_P
        assert adding.arguments["first"] == exchange % 2 * MOST * WIDTH
        assert prefill.summed(found, summed) is summed


def test_sums_of_shorter_chunks_cover_their_own_rows() -> None:
    def record(tokens: int) -> list[Launch]:
        found = recording(tokens, peers(0, 2))
        prefill.summed(found, shared(found))
        return launches(found)

    assert_serves_shorter_chunks(lambda tokens: record(tokens)[-1:], MOST)
    longest = record(MOST)[-1]
    assert longest.shape_of is not None
    for tokens in (9, 100, MOST):
        shape = longest.shape_of(tokens)
        assert shape is not None
        assert shape.numbers == {"tokens": tokens}
        values = 4 * shape.threads * shape.grid[0]
        assert tokens * WIDTH <= values < tokens * WIDTH + 4 * shape.threads


@pytest.mark.parametrize("width", [6, 65])
def test_rows_that_are_no_whole_vectors_are_added_value_by_value(width: int) -> None:
    """Those of an odd product lie apart, and have no gaps where the other ranks read them."""
    view = peers(0, 2, width)
    found = recording(MOST, view)
    y_TE = shared(found, width)
    assert isinstance(y_TE, prefill.PartialSum)
    assert y_TE.own_TE.is_contiguous()
    prefill.summed(found, y_TE)
    added = found.items[-1]
    assert isinstance(added, Launch)
    shape = shape_at(added, MOST)
    assert isinstance(shape, Shape)
    assert dict(shape.kernel.defines)["COUNT"] == 1
    blocks, _, _ = shape.grid
    assert blocks * shape.threads >= MOST * width
    assert added.arguments["first"] == 0
    assert found.placed[storage_key(y_TE.own_TE)].shape == (MOST, width)


def test_partial_results_give_their_memory_back() -> None:
    """Those of later layers lie where those of earlier ones were."""

    def workspace(layers: int) -> int:
        found = recording(MOST, peers(0, 2))
        for _ in range(layers):
            prefill.summed(found, shared(found))
        return lay_out(found).nbytes

    assert workspace(12) == workspace(3)
