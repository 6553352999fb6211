"""What a chunk of a prompt leaves for a recorded module's rows, on the CPU."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.caches.rows import RowFormat
from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.recorded_drafts import RecordedDrafts
from dsv4.speculative.recorded_modules import RecordedClassic, RecordedDSpark
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import CPU
from tests.speculative.models import KINDS

CONFIG = ModelConfig.from_dict(tiny_config(sliding_window=16))
TAPS = 2


def recorded(kind: MtpKind) -> RecordedClassic | RecordedDSpark:
    """Only its memory is there."""
    classic = kind == "classic"
    state = DraftState.allocate(CONFIG, 1, RowFormat.PLAIN, torch.float32, CPU, classic)
    taps = 1 if classic else TAPS
    memory = DraftMemory.allocate(CONFIG, state, [CPU], taps, torch.float32)
    nothing: Any = None
    read = (state, memory, memory.inputs[CPU], nothing)
    if state.streams_SME is None:
        return RecordedDSpark(nothing, *read)
    return RecordedClassic(nothing, *read, state.streams_SME)


@pytest.mark.parametrize("lacks_the_first", [False, True])
@pytest.mark.parametrize("lengths", [[60], [9, 30, 9, 27], [28, 45, 20]])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_last_tokens(
    kind: MtpKind, lengths: list[int], lacks_the_first: bool
) -> None:
    """The streams of a position are its number, the token at it 1000 more."""
    module = recorded(kind)
    memory = module.memory
    most = module.state.remembered_rows
    # A row of classic MTP is at the position before its token.
    shift = 1 if kind == "classic" else 0
    end = 0
    for length in lengths:
        start = end
        end += length
        positions_T = torch.arange(start, end)
        streams_T11 = positions_T.float()[:, None, None]
        taps = [streams_T11.expand(-1, CONFIG.hc_mult, CONFIG.hidden_size)] * len(memory.tails)
        if lacks_the_first:
            taps = [tap[-most - 1 :] for tap in taps]
        module.state.rejected_1.fill_(3)
        rows = module.leave(start, taps, positions_T + 1000)
        first = end - rows - shift
        assert rows == min(length, most)
        assert (int(module.state.position_1), int(module.state.rejected_1)) == (first, 0)
        known = max(0, -first)
        expected_R = torch.arange(first, first + rows)
        for tail in memory.tails:
            assert torch.equal(tail[known:rows, 0, 0], expected_R[known:].float())
        if kind == "classic":
            assert torch.equal(memory.tail_tokens_R[:rows], expected_R + 1001)


def test_a_chunk_is_left_where_it_began() -> None:
    """A recording of the longest chunk runs it; the host has counted its tokens already."""
    left: list[tuple[int, int, list[int]]] = []
    ran: list[int] = []

    def leave(start: int, taps: Sequence[Tensor], tokens_T: Tensor) -> int:
        left.append((start, taps[0].shape[0], tokens_T.tolist()))
        return 3

    module: Any = SimpleNamespace(leave=leave)
    memory: Any = SimpleNamespace(tail_tokens_R=torch.zeros(5, dtype=torch.int64))
    table: Any = SimpleNamespace(exact=False)
    counted: Any = SimpleNamespace(position=40)
    program: Any = SimpleNamespace(run=ran.append)
    nothing: Any = None
    drafts = RecordedDrafts(module, memory, nothing, table, CPU, counted, None, {5: program})
    drafts._run_tail(12, torch.arange(16), torch.zeros(16, 1, 1, dtype=torch.float32))
    assert left == [(28, 12, list(range(12)))]
    assert ran == [3]
