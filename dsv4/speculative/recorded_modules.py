"""Draft modules written to recordings: what they remember of a step, and the drafts of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.launch.recording import Recording
from dsv4.layers.classic_mtp import ClassicMTP, Rows
from dsv4.layers.dspark import DSpark
from dsv4.ops import Ops
from dsv4.ops.acceptance.cuda import enter_drafts
from dsv4.ops.draft_rows import Block, Place
from dsv4.ops.draft_rows.cuda import begin_rows, recall_streams, shift_streams
from dsv4.ops.draft_tables import draft_ops
from dsv4.sampling import SamplerState
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.module import DraftModule, DraftScope


class RecordedModule(Protocol):
    """A module whose steps are recorded."""

    @property
    def scope(self) -> DraftScope:
        """What it reads and makes."""
        ...

    @property
    def rows(self) -> int:
        """Of a recording that drafts."""
        ...

    def remember(
        self, ops: Ops, recording: Recording, taps: Sequence[Tensor], tokens_T: Tensor, place: Place
    ) -> None:
        """The keys of the step that ``recording`` has run, of tokens int64 ``[T]``."""
        ...

    def remember_tail(self, ops: Ops, recording: Recording) -> None:
        """The keys of what a prompt's chunk has left in memory (``leave``)."""
        ...

    def leave(self, start: int, taps: Sequence[Tensor], tokens_T: Tensor) -> int:
        """Copies what ``remember_tail`` reads of a chunk from position ``start`` on: how many rows
        it then runs. ``taps`` may lack the first tokens: one row more than ``remembered_rows`` are
        enough.
        """
        ...

    def draft(
        self, ops: Ops, recording: Recording, count: int, place: Place, sampler: SamplerState
    ) -> Tensor:
        """The drafts behind the token in ``memory.inputs``, and there too; the streams behind the
        last row.
        """
        ...


@dataclass(frozen=True)
class RecordedDSpark:
    """``RecordedModule`` of DSpark."""

    module: DSpark
    state: DraftState
    memory: DraftMemory
    inputs_T: Tensor
    scope: DraftScope

    @property
    def rows(self) -> int:
        """A block."""
        return self.module.keys.block_size

    def remember(
        self, ops: Ops, recording: Recording, taps: Sequence[Tensor], tokens_T: Tensor, place: Place
    ) -> None:
        """See ``RecordedModule``."""
        state = self.state
        begin_rows(recording, place, -recording.tokens, (state.position_1, state.rejected_1))
        self._remember(ops, recording, taps)

    def remember_tail(self, ops: Ops, recording: Recording) -> None:
        """See ``RecordedModule``."""
        self._remember(ops, recording, self.memory.tails)

    def leave(self, start: int, taps: Sequence[Tensor], tokens_T: Tensor) -> int:
        """See ``RecordedModule``."""
        tokens = tokens_T.shape[0]
        rows = min(tokens, self.state.remembered_rows)
        for tail, tap in zip(self.memory.tails, taps, strict=True):
            tail[:rows].copy_(tap[-rows:])
        self.state.position_1.fill_(start + tokens - rows)
        self.state.rejected_1.zero_()
        return rows

    def draft(
        self, ops: Ops, recording: Recording, count: int, place: Place, sampler: SamplerState
    ) -> Tensor:
        """See ``RecordedModule``: a whole block, and its first drafts one after the other."""
        module = self.module
        state = self.state
        memory = self.memory
        drafts = draft_ops(recording, ops)
        own = (state.position_1, state.rejected_1)
        previous_1 = self.inputs_T[:1]
        block = Block(memory.block_B, previous_1, module.keys.noise_token_id)
        begin_rows(recording, place, 0, own, block)
        streams_BME, positions_B, logits_BV = module.run(ops, drafts, memory.block_B, state)
        for slot in range(count):
            read = (previous_1, module.markov_w1_VR, module.markov_w2)
            logits_V = drafts.markov_logits(logits_BV[slot], *read)
            recording.place(logits_V, memory.logits_NV[slot])
            # Behind the last position of the block comes the one that it has moved to.
            at_1 = positions_B[slot + 1 : slot + 2] if slot + 1 < self.rows else state.position_1
            token = sampler.choose(ops, logits_V, at_1)
            recording.place(token, memory.drafts_N[slot])
            previous_1 = token.view(1)
        enter_drafts(recording, memory.drafts_N[:count], self.inputs_T[1 : 1 + count])
        return streams_BME

    def _remember(self, ops: Ops, recording: Recording, taps: Sequence[Tensor]) -> None:
        state = self.state
        positions_T = ops.next_positions(state.position_1, state.rejected_1, recording.tokens)
        self.module.remember(ops, draft_ops(recording, ops), taps, positions_T, state)


@dataclass(frozen=True)
class RecordedClassic:
    """``RecordedModule`` of classic MTP. The row of a position needs the token behind it: that of a
    step's last position is run with the next step.
    """

    module: ClassicMTP
    state: DraftState
    memory: DraftMemory
    inputs_T: Tensor
    scope: DraftScope
    ring_SME: Tensor
    rows: int = 1

    def remember(
        self, ops: Ops, recording: Recording, taps: Sequence[Tensor], tokens_T: Tensor, place: Place
    ) -> None:
        """See ``RecordedModule``: a row for every token, at the position before it."""
        state = self.state
        begin_rows(recording, place, -recording.tokens - 1, (state.position_1, state.rejected_1))
        rows_TME = shift_streams(recording, taps[0], self.ring_SME, state.position_1)
        self._remember(ops, recording, tokens_T, rows_TME)

    def remember_tail(self, ops: Ops, recording: Recording) -> None:
        """See ``RecordedModule``."""
        self._remember(ops, recording, self.memory.tail_tokens_R, self.memory.tails[0])

    def leave(self, start: int, taps: Sequence[Tensor], tokens_T: Tensor) -> int:
        """See ``RecordedModule``; the last streams go to the ring."""
        (streams_TME,) = taps
        tokens = tokens_T.shape[0]
        end = start + tokens
        rows = min(tokens, self.state.remembered_rows)
        tail = self.memory.tails[0]
        if rows < tokens:
            tail[:rows].copy_(streams_TME[-1 - rows : -1])
        else:
            tail[:1].copy_(self.state.streams_at(start - 1))
            tail[1:rows].copy_(streams_TME[:-1])
        self.memory.tail_tokens_R[:rows].copy_(tokens_T[tokens - rows :])
        self.state.keep_streams(streams_TME, end)
        self.state.position_1.fill_(end - rows - 1)
        self.state.rejected_1.zero_()
        return rows

    def draft(
        self, ops: Ops, recording: Recording, count: int, place: Place, sampler: SamplerState
    ) -> Tensor:
        """See ``RecordedModule``: a row for every draft, the first one of the main model's
        streams.
        """
        state = self.state
        memory = self.memory
        drafts = draft_ops(recording, ops)
        own = (state.position_1, state.rejected_1)
        begin_rows(recording, place, -1, own)
        streams_1ME = recall_streams(recording, self.ring_SME, state.position_1)
        for slot in range(count):
            rows = Rows(self.inputs_T[slot : slot + 1], streams_1ME, *own)
            streams_1ME, logits_1V = self.module(ops, drafts, rows, state.stages[0])
            recording.place(logits_1V, memory.logits_NV[slot : slot + 1])
            at_1 = recording.empty((1,), torch.int64)
            begin_rows(recording, place, 1 + slot, (at_1, recording.empty((1,), torch.int64)))
            token = sampler.choose(ops, logits_1V[0], at_1)
            recording.place(token, memory.drafts_N[slot])
            entered_1 = self.inputs_T[slot + 1 : slot + 2]
            enter_drafts(recording, memory.drafts_N[slot : slot + 1], entered_1)
        return streams_1ME

    def _remember(
        self, ops: Ops, recording: Recording, tokens_T: Tensor, streams_TME: Tensor
    ) -> None:
        state = self.state
        rows = Rows(tokens_T, streams_TME, state.position_1, state.rejected_1)
        self.module.remember(ops, draft_ops(recording, ops), rows, state.stages[0])


def recorded_module(
    module: DraftModule,
    scope: DraftScope,
    state: DraftState,
    memory: DraftMemory,
    head: torch.device,
) -> RecordedModule:
    """The module's recorded form."""
    read = (state, memory, memory.inputs[head], scope)
    if isinstance(module, DSpark):
        return RecordedDSpark(module, *read)
    assert state.streams_SME is not None
    return RecordedClassic(module, *read, state.streams_SME)
