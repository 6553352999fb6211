"""A draft module recorded along with every step of the main model (``dsv4.step.along.Along``),
and the steps of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.launch.program import Program
from dsv4.launch.target import Target
from dsv4.layers.values import ValueSink
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Outputs, Transformer
from dsv4.ops.acceptance.cuda import judge_drafts, settle_block
from dsv4.ops.exchange.token_share import TokenShare
from dsv4.ops.tables import RecordedTable
from dsv4.sampling import SamplerState
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.module import DraftModule, DraftScope, far_layer
from dsv4.speculative.recorded_modules import RecordedModule, recorded_module
from dsv4.speculative.shared_rows import SharedRows
from dsv4.speculative.taps import Taps
from dsv4.step.along import Targets
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder


@dataclass(frozen=True)
class RecordedDrafts:
    """``Along`` of a draft module on the device ``head``.

    Up to 8 tokens a step also has the module's rows, and the choice of what stays of its drafts.
    Longer ones leave their last streams, with which the module runs ``_tails``, programs by length,
    as soon as the step is queued.

    Of several ranks each has its own; ``shared`` puts together what they have of those streams, and
    ``counted`` is the state of rank 0, in which the host counts. ``state`` is the rank's.
    """

    module: RecordedModule
    memory: DraftMemory
    state: DecodeState
    table: RecordedTable
    head: torch.device
    counted: DecodeState
    shared: SharedRows | None
    _tails: dict[int, Program] = field(default_factory=dict)

    @property
    def inputs(self) -> Mapping[torch.device, Tensor]:
        """See ``Along``."""
        return self.memory.inputs

    def listen(self, behind: ValueSink) -> ValueSink:
        """See ``Along``."""
        return Taps(self.module.scope.taps, behind)

    def record(self, recorder: StepRecorder, values: ValueSink) -> None:
        """See ``Along``."""
        assert isinstance(values, Taps)
        taps = [values.found[name] for name in self.module.scope.taps]
        tokens_T = recorder.tokens(self.head)
        tokens = tokens_T.shape[0]
        recording = recorder.recording(self.head)
        with recorder.part("draft", self.head) as ops:
            if tokens <= MAX_DECODE_TOKENS:
                place = self.state.place(self.head)
                self.module.remember(ops, recording, taps, tokens_T, place)
                return
            rows = taps
            if self.shared is not None:
                self.shared.record(recording, taps)
                rows = self.memory.shared
            recording.call(self._run_tail, tokens_T, *rows)

    def record_choice(
        self,
        recorder: StepRecorder,
        logits_TV: Tensor,
        token: Tensor | None,
        sampler: SamplerState,
    ) -> None:
        """See ``Along``: which tokens of the step stay, and the one behind them."""
        memory = self.memory
        count = logits_TV.shape[0] - 1
        place = self.state.place(self.head)
        recording = recorder.recording(self.head)
        with recorder.part("sample", self.head) as ops:
            behind = sampler.choose(ops, logits_TV[-1], place[0]) if token is None else token
            judged = None
            if count:
                drafts_N = memory.drafts_N[:count]
                proposed = (memory.logits_NV[:count], drafts_N)
                read = (sampler.settings_4, sampler.seed_1, place[0])
                judged = judge_drafts(recording, logits_TV, *proposed, *read), drafts_N
            next_1 = memory.inputs[self.head][:1]
            for_host = (memory.ring_3R, self.state.nan_1)
            settle_block(recording, judged, behind, place, next_1, *for_host)

    def own_steps(self, targets: Targets, sampler: SamplerState) -> list[RecordedStep]:
        """See ``Along``: the longest draft."""
        return [self.draft_step(targets, sampler, self.module.scope.most)]

    def steps_apart(self, target: Target) -> list[RecordedStep]:
        """See ``Along``: the rows of prompts."""
        return [self._tail_step(target, self._tail_rows)]

    def draft_step(self, targets: Targets, sampler: SamplerState, count: int) -> RecordedStep:
        """The step that drafts."""
        recorder = self._recorder(targets, self.module.rows, alone=False)
        with recorder.part("draft", self.head) as ops:
            recording = recorder.recording(self.head)
            place = self.state.place(self.head)
            streams_TME = self.module.draft(ops, recording, count, place, sampler)
        return recorder.finish(Outputs(streams_TME, None), None, self.head)

    def ready(self, target: Target) -> None:
        """Gives memory to what runs behind prompts."""
        if not self.table.exact:
            recording = self._tail_step(target, self._tail_rows).recordings[self.head]
            self._tails[self._tail_rows] = Program(recording)

    @property
    def _tail_rows(self) -> int:
        return self.memory.tail_tokens_R.shape[0]

    def _tail_step(self, target: Target, rows: int) -> RecordedStep:
        recorder = self._recorder({self.head: target}, rows, alone=True)
        memory = self.memory
        with recorder.part("draft", self.head) as ops:
            self.module.remember_tail(ops, recorder.recording(self.head))
        return recorder.finish(Outputs(memory.tails[0], None), None, self.head)

    def _run_tail(self, tokens: int, tokens_T: Tensor, *taps: Tensor) -> None:
        start = self.counted.position - tokens
        given = [tap[:tokens] for tap in taps]
        rows = self.module.leave(start, given, tokens_T[:tokens])
        length = rows if self.table.exact else self._tail_rows
        if length not in self._tails:
            step = self._tail_step(Target.of(self.head), length)
            self._tails[length] = Program(step.recordings[self.head])
        self._tails[length].run(rows)

    def _recorder(self, targets: Targets, tokens: int, alone: bool) -> StepRecorder:
        """NaN among drafts ends the drafts, not the run: it is not noted."""
        unread = {device: self.memory.inputs[device].new_empty(tokens) for device in targets}
        read = (self.table, targets, self.state, unread)
        return StepRecorder(*read, notes_nan=False, alone=alone)


def record_drafts(
    config: ModelConfig,
    modules: Sequence[DraftModule],
    models: Sequence[Transformer],
    state: DecodeState,
    table: RecordedTable,
) -> list[RecordedDrafts]:
    """The module of every rank as it runs along with the rank's model; the ranks' ``state.draft``
    have its caches. Of a plan rank 0 alone.

    Raises ``UserError`` where the module reads a layer that is not on the device of the head.
    """
    scope = DraftScope.of(modules[0], models[0].segments[-1].layers[-1])
    _check_near(models[0], scope.layers)
    dtype = models[0].embed.compute_dtype
    ranks = 1 if state.peers is None else state.peers.ranks
    memories = [
        DraftMemory.allocate(config, _draft(own), own.devices, len(scope.layers), dtype, ranks)
        for own in state.ranks[: len(modules)]
    ]
    of_ranks = tuple(memory.shared for memory in memories)
    found = []
    for rank, (module, model, memory) in enumerate(zip(modules, models, memories, strict=True)):
        own = state.ranks[rank]
        head = model.head_device
        recorded = recorded_module(module, scope, _draft(own), memory, head)
        shared = SharedRows(TokenShare(rank, ranks), of_ranks) if ranks > 1 else None
        found.append(RecordedDrafts(recorded, memory, own, table, head, state, shared))
    return found


def _draft(state: DecodeState) -> DraftState:
    assert state.draft is not None, "a module has caches"
    return state.draft


def _check_near(model: Transformer, read: Sequence[int]) -> None:
    devices = {layer: segment.device for segment in model.segments for layer in segment.layers}
    layer = far_layer(read, devices)
    if layer is not None:
        raise UserError(
            f"EngineConfig.gpus: found layer {layer}, which the draft module reads, on "
            f"{devices[layer]}, expected {model.head_device} of the last layer"
        )
