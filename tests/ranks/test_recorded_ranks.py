"""What ranks of whole models record: the kernels of a lone rank, words of every exchange once, and
memory that the plan knows.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import Geometry
from dsv4.launch.boxes import Boxes
from dsv4.launch.items import Launch
from dsv4.launch.workspace import lay_out
from dsv4.ops.trees import tensors_in
from dsv4.parallel.received_bytes import exchange_bytes
from dsv4.peers import LOGITS_EXCHANGE
from tests.launch.simulated_memory import assert_buffers_survive
from tests.ranks.planned_ranks import (
    exchange_of,
    has_words,
    launches,
    planned_ranks,
    pushes,
    sharing_layers,
)
from tests.step.planned_model import ENGINE, PlannedModel, geometry

LAYERS = 6
GEOMETRIES: dict[str, tuple[Geometry, int]] = {
    "flash, 2 ranks": ("v4-flash", 2),
    "flash, 8 ranks": ("v4-flash", 8),
    "pro, 2 ranks": ("v4-pro", 2),
    "pro, 8 ranks": ("v4-pro", 8),
}


@pytest.fixture(scope="module", params=GEOMETRIES)
def ranks(request: pytest.FixtureRequest) -> list[PlannedModel]:
    return planned_ranks(*GEOMETRIES[request.param], LAYERS)


@pytest.fixture(scope="module")
def lone(ranks: list[PlannedModel]) -> PlannedModel:
    width = ranks[0].config.hidden_size
    return geometry("v4-flash" if width == 4096 else "v4-pro", layers=LAYERS)


def names(found: list[Launch]) -> list[str]:
    return [launch.signature.kernel for launch in found]


def number(launch: Launch, name: str) -> int:
    value = launch.arguments[name]
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_decode_step_has_the_kernels_of_a_lone_rank_and_gathers_logits(
    ranks: list[PlannedModel], lone: PlannedModel, tokens: int
) -> None:
    expected = names(launches(lone.record(tokens)))
    found = names(launches(ranks[-1].record(tokens)))
    assert [name for name in found if name != "gather_logits"] == expected
    assert found.count("gather_logits") == 1


def test_a_chunk_adds_two_partial_results_a_layer(
    ranks: list[PlannedModel], lone: PlannedModel
) -> None:
    step = ranks[0].record(512)
    found = names(launches(step))
    assert found.count("sum_ranks") == 2 * LAYERS
    assert found.count("moe_combine_partial") == names(launches(lone.record(512))).count(
        "moe_combine"
    )
    assert "moe_combine" not in found
    assert not any(map(has_words, launches(step)))


@pytest.mark.parametrize("tokens", [1, 8])
def test_every_exchange_is_pushed_once_and_polled_behind_it(
    ranks: list[PlannedModel], tokens: int
) -> None:
    """A rank reads one sum before it pushes its part of the next: so two slots are enough, and one
    for rows that are shared.
    """
    for planned in (ranks[0], ranks[-1]):
        words = [launch for launch in launches(planned.record(tokens)) if has_words(launch)]
        shared = sharing_layers(planned, len(ranks))
        expected = []
        for layer in range(LAYERS):
            expected += [("rows", 2 * layer)] if layer in shared else []
            expected += [("sum", 2 * layer), ("sum", 2 * layer + 1)]
        expected.append(("sum", LOGITS_EXCHANGE))
        assert [pushes(launch) for launch in words] == [True, False] * len(expected)
        assert [exchange_of(launch) for launch in words[::2]] == expected
        assert [exchange_of(launch) for launch in words[1::2]] == expected
        # Attention's have even numbers, the experts' odd ones.
        assert names([one for one in words[::2] if number(one, "exchange") % 2]) == [
            *["moe_decode"] * LAYERS,
            "decode_linear",
        ]


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_words_of_ranks_lie_inside_the_inbox_and_not_in_each_other(
    ranks: list[PlannedModel], tokens: int
) -> None:
    pushed: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for planned in ranks:
        peers = planned.state.peers
        assert peers is not None
        for launch in launches(planned.record(tokens)):
            if not has_words(launch):
                continue
            what, index = exchange_of(launch)
            slot = number(launch, "slot")
            rows = peers.layout.head_rows if index == LOGITS_EXCHANGE else peers.layout.width
            if what == "rows" and pushes(launch):
                rows = 16 * (number(launch, "tiles0") + number(launch, "tiles1"))
            assert tokens * rows <= peers.layout.rank_words
            if pushes(launch):
                ends = slot, slot + peers.layout.rank_words
                pushed.setdefault((what, index), []).append(ends)
            else:
                own = peers.layout.rows_slot if what == "rows" else peers.layout.slot(index)
                assert slot == own
                assert number(launch, "rank_words") == peers.layout.rank_words
            assert dict(launch.shape.kernel.defines)["RANKS"] == len(ranks)
        assert max(end for found in pushed.values() for _, end in found) <= peers.layout.words
    shared = sharing_layers(ranks[0], len(ranks))
    assert len(pushed) == 2 * LAYERS + len(shared) + 1
    for found in pushed.values():
        assert len(found) == len(ranks)
        ends = sorted(found)
        assert all(one[1] == other[0] for one, other in pairwise(ends))
    # Sums that follow each other, the logits and shared rows have places of their own.
    spans = {of: (min(found)[0], max(found)[1]) for of, found in pushed.items()}
    order = [("sum", 0), ("sum", 1), ("sum", LOGITS_EXCHANGE)]
    order += [("rows", 2 * layer) for layer in shared[:1]]
    for first, second in pairwise(order):
        assert spans[first][1] <= spans[second][0]


def test_ranks_record_the_same_but_for_their_place(ranks: list[PlannedModel]) -> None:
    """Equal plans give equal bits: shapes and numbers, but for the words, the rank and, of uneven
    parts of the vocabulary, the head.
    """

    def described(launch: Launch) -> tuple[Any, ...]:
        numbers = {
            name: value
            for name, value in launch.arguments.items()
            if not isinstance(value, Tensor | Boxes)
            and name not in ("slot", "owner", "first_token", "first_tile0", "first_tile1")
        }
        return launch.shape, numbers

    for tokens in (1, 512):
        first = launches(ranks[0].record(tokens))
        last = launches(ranks[-1].record(tokens))
        assert names(first) == names(last)
        different = [
            one.arguments.get("exchange")
            for one, other in zip(first, last, strict=True)
            if described(one) != described(other)
        ]
        assert set(different) <= {LOGITS_EXCHANGE}


def test_a_lone_rank_has_no_words(lone: PlannedModel) -> None:
    for tokens in (1, 8, 512):
        for launch in launches(lone.record(tokens)):
            assert not has_words(launch)
            assert "RANKS" not in dict(launch.shape.kernel.defines)
            assert launch.signature.kernel not in ("gather_logits", "sum_ranks", "sum_words")


def test_a_step_is_counted_by_the_kernel_that_opens_it(
    ranks: list[PlannedModel], lone: PlannedModel
) -> None:
    for tokens in (1, 512):
        step_4 = ranks[1].state.peers
        assert step_4 is not None
        opening = launches(ranks[1].record(tokens))[0]
        assert opening.arguments["step"] is step_4.step_4
        assert launches(lone.record(tokens))[0].arguments["step"] is None


def test_no_buffer_of_a_rank_lies_in_another_that_is_alive(ranks: list[PlannedModel]) -> None:
    for tokens in (1, 8, 512):
        for recording in ranks[-1].record(tokens).recordings.values():
            assert_buffers_survive(recording, lay_out(recording))


def test_the_workspace_of_every_rank_is_that_of_rank_0(ranks: list[PlannedModel]) -> None:
    """What is planned is recorded for rank 0 alone."""
    for tokens in (1, 8, 512):
        sizes = [[*planned.record(tokens).workspace_bytes().values()] for planned in ranks]
        assert sizes == [sizes[0]] * len(ranks)


def test_a_deeper_chunk_needs_no_more_workspace() -> None:
    few, many = (planned_ranks("v4-flash", 2, layers)[0].record(512) for layers in (6, 16))
    assert few.workspace_bytes() == many.workspace_bytes()


def test_the_plan_counts_what_ranks_exchange(ranks: list[PlannedModel]) -> None:
    peers = ranks[0].state.peers
    assert peers is not None
    large = [tensor for tensor in tensors_in(peers) if tensor.numel() > 1000]
    assert {tensor.dtype for tensor in large} == {torch.int64, torch.float32, torch.bfloat16}
    # Of the whole model the plan needs only what is not cut.
    planned = exchange_bytes(ranks[0].config, ENGINE, len(ranks))
    assert sum(tensor.nbytes for tensor in large) == planned
