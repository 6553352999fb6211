"""What is done for all ranks at once: their steps, inputs, settings, tokens and faults."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsv4.sampling import Sampler, SamplingParams
from dsv4.speculative.block_ring import BlockRings, Given
from dsv4.step.lock_step import Feeds, Rings, Samplers
from tests.ranks.planned_ranks import LoggedRanks, planned_ranks
from tests.step.planned_model import items_of
from tests.step.test_running_parts import dense_items_of

NO_FAULT = torch.zeros(4, dtype=torch.int32)


def test_tokens_that_differ_are_a_fault_with_the_rank_and_the_position() -> None:
    tokens = [5, 5, 5]
    marked: list[int] = []
    fakes: list[Any] = [
        SimpleNamespace(mark=marked.append, read=lambda position, rank=rank: tokens[rank])
        for rank in range(3)
    ]
    rings = Rings(fakes, NO_FAULT)
    rings.mark(7)
    assert marked == [7] * 3
    assert rings.read(7) == 5
    tokens[2] = 6
    message = "^ranks: found token 6 of rank 2 at position 8, expected 5 as of rank 0$"
    with pytest.raises(RuntimeError, match=message):
        rings.read(8)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ([0, 7, 1, 9], "^trapped$"),
        ([1, 7, 1, 9], r"^CUDA error: words of rank 1 did not come \(exchange 7 of step 9\)$"),
    ],
    ids=["another fault", "missing words"],
)
def test_a_rank_that_was_waited_for_in_vain_is_named(fault: list[int], message: str) -> None:
    def read(_: int) -> int:
        raise torch.AcceleratorError("trapped")

    rings = Rings([cast(Any, SimpleNamespace(read=read))], torch.tensor(fault, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=message):
        rings.read(3)


def test_all_ranks_leave_the_choice_out_of_dense_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = LoggedRanks.of(planned_ranks("v4-flash", 2, 5), 1, monkeypatch)
    ranks.step.run(1, 100)
    for step in ranks.step.ranks:
        own = [entry for entry in ranks.log if entry[0] == step.recorded.head]
        assert own == dense_items_of(step) != items_of(step.model_parts)


def test_inputs_and_settings_go_to_every_rank() -> None:
    log: list[Any] = []
    fakes: list[Any] = [
        SimpleNamespace(
            put=lambda ids, rank=rank: log.append((rank, ids)),
            pass_on=lambda rank=rank: log.append((rank, "pass on")),
            load=lambda sampler, rank=rank: log.append((rank, sampler)),
        )
        for rank in range(2)
    ]
    sampler = Sampler(SamplingParams())
    Feeds(fakes).put([3, 4])
    Feeds(fakes).pass_on()
    Samplers(fakes).load(sampler)
    expected = [[3, 4], "pass on", sampler]
    assert log == [(rank, what) for what in expected for rank in range(2)]


def block_rings(*given: list[int]) -> tuple[BlockRings, list[Any]]:
    """Rings of ranks that have kept these tokens, and the log of what they are told."""
    log: list[Any] = []
    fakes: list[Any] = [
        SimpleNamespace(
            begin=lambda rank=rank: log.append((rank, "begin")),
            mark_drafted=lambda rank=rank: log.append((rank, "drafted")),
            mark_settled=lambda rank=rank: log.append((rank, "settled")),
            forget=lambda rank=rank: log.append((rank, "forget")),
            read=lambda position, rank=rank, tokens=tokens: Given(tokens, 3, (rank, position)),
        )
        for rank, tokens in enumerate(given)
    ]
    return BlockRings(fakes, NO_FAULT), log


def test_blocks_that_ranks_have_kept_are_those_of_rank_0() -> None:
    rings, log = block_rings([5, 6], [5, 6])
    rings.begin()
    rings.mark_drafted()
    rings.mark_settled()
    rings.forget()
    told = ("begin", "drafted", "settled", "forget")
    assert log == [(rank, what) for what in told for rank in range(2)]
    assert rings.read(9) == Given([5, 6], 3, (0, 9))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, 7], "found token 7 of rank 1 at position 11, expected 6 as of rank 0"),
        ([5], "found no token of rank 1 at position 11, expected 6 as of rank 0"),
        ([5, 6, 8], "found token 8 of rank 1 at position 12, expected none as of rank 0"),
    ],
)
def test_blocks_that_differ_are_a_fault(tokens: list[int], message: str) -> None:
    rings, _ = block_rings([5, 6], tokens)
    with pytest.raises(RuntimeError, match=f"^ranks: {message}$"):
        rings.read(9)


def test_nan_that_one_rank_has_seen_counts_for_all() -> None:
    """The flag is one for all ranks, and a later step may set it before a rank settles."""
    for given in (([5, 6], []), ([], [5, 6])):
        rings, _ = block_rings(*given)
        assert rings.read(9).tokens == []
