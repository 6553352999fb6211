"""Recording a step: the model's parts in order, each with its items on one device's recording.

Nothing here needs a GPU: on a planned state and planned weights (torch's meta device) the result is
the memory plan and the list of kernels to compile; on real ones it is what ``dsv4.step.step`` runs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.channels import Channel, Ends
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.layers.values import UNTRACED, ValueSink
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Arrival, Outputs, PartKind, Transformer
from dsv4.ops import Ops
from dsv4.ops.channel.cuda import receive_rows, send_rows, take_tokens
from dsv4.ops.exchange.decode import begin_logits
from dsv4.ops.tables import RecordedTable
from dsv4.sampling import SamplerState
from dsv4.step.along import Along
from dsv4.step.parts import AnyPart, Barrier, Part, Transfer
from dsv4.step.recorded import RecordedStep
from dsv4.step.shared_head import sharing_head
from dsv4.step.traced_values import TracedValues

# The host reads tokens a few steps behind the device, which stores them in a ring of this length.
RING_TOKENS = 16


@dataclass(frozen=True)
class TokenLoopMemory:
    """The memory that lets the next step follow without the host: the sampler's settings, and the
    ring in which the host finds the tokens (int64 ``[R]``, pinned).
    """

    sampler: SamplerState
    ring_R: Tensor


class _OpenPart(NamedTuple):
    """A part whose items from ``start`` on are being recorded."""

    kind: PartKind
    device: torch.device
    layer: int | None
    start: int


class StepRecorder:
    """The ``Parts`` of a recorded step."""

    def __init__(
        self,
        table: RecordedTable,
        targets: Mapping[torch.device, Target],
        state: DecodeState,
        inputs: Mapping[torch.device, Tensor],
        traced: TracedValues | None = None,
        notes_nan: bool = True,
        alone: bool = False,
    ) -> None:
        """``inputs``: int64 ``[T]`` on every device, where the token ids will be. ``notes_nan``:
        whether NaN that is compared counts as the step's. ``alone``: the rank needs no other one.
        """
        self._tokens = next(iter(inputs.values())).shape[0]
        self._exact = table.exact
        self._state = state
        self._inputs = inputs
        self._traced = traced
        self._sink: ValueSink = UNTRACED if traced is None else traced
        nan_1 = state.nan_1 if notes_nan else None
        peers = None if alone else state.peers
        self._recordings = {
            device: Recording(targets[device], self._tokens, nan_1, peers, traced is not None)
            for device in inputs
        }
        self._ops = {device: table.on(recording) for device, recording in self._recordings.items()}
        self._parts: list[AnyPart] = []
        self._open: list[_OpenPart] = []
        self._undrained: torch.device | None = None
        self._channels = state.channels if self._tokens <= MAX_DECODE_TOKENS else None
        self._uses: Counter[Ends] = Counter()
        self._given: Mapping[Ends, Tensor] = {}
        self._untaken: dict[torch.device, Ends] = {}

    @property
    def tokens_of_step(self) -> int:
        """The most tokens of a run."""
        return self._tokens

    @property
    def values(self) -> ValueSink:
        """Those of a traced step, or none, and what listens along."""
        return self._sink

    def listen(self, along: Along) -> ValueSink:
        """Shows the values to ``along`` first."""
        self._sink = along.listen(self._sink)
        return self._sink

    @contextmanager
    def part(self, kind: PartKind, device: torch.device, layer: int | None = None) -> Iterator[Ops]:
        """Everything recorded inside belongs to this part, which is left out if it is nothing. A
        part inside another one parts that in two.
        """
        self._interrupt()
        own = _OpenPart(kind, device, layer, len(self._recordings[device].items))
        self._open.append(own)
        self._trace(own)
        ops = self._ops[device]
        # Made for the part alone: kept, it would keep the recorder, and the recorder it.
        yield ops if self._exact else sharing_head(self, ops)
        self._interrupt()
        self._open.pop()
        if self._open:
            self._trace(self._open[-1])

    def _trace(self, part: _OpenPart) -> None:
        """The next values are those of this part."""
        if self._traced is not None:
            self._traced.open(self._recordings[part.device])

    def _interrupt(self) -> None:
        """What the open part has so far is a part of its own."""
        if not self._open:
            return
        kind, device, layer, start = self._open.pop()
        recording = self._recordings[device]
        end = len(recording.items)
        self._open.append(_OpenPart(kind, device, layer, end))
        if end == start:
            return
        drains = self._undrained if kind == "experts" else None
        if drains is not None:
            self._undrained = None
        for stop, ranks_meet in recording.end_part():
            self._parts.append(Part(kind, device, layer, start, stop))
            if ranks_meet:
                self._parts.append(Barrier(device))
            start = stop
        if start < end:
            self._parts.append(Part(kind, device, layer, start, end, drains))

    def await_tokens(self, given: Mapping[Ends, Tensor]) -> None:
        """Where the host has not ``given`` the ids of the step, these channels bring them
        (``dsv4.step.token_feed``).
        """
        self._given = given
        self._untaken = {target: (source, target) for source, target in given}

    def recording(self, device: torch.device) -> Recording:
        """What is recorded for ``device``."""
        return self._recordings[device]

    def tokens(self, device: torch.device) -> Tensor:
        """The input of the step on ``device``, in a part of it: the ids are there."""
        tokens_T = self._inputs[device]
        ends = self._untaken.pop(device, None)
        if ends is not None:
            channel = self._channel(*ends)
            take_tokens(self._recordings[device], channel, tokens_T, self._given[ends])
        return tokens_T

    def pass_on(self, token: Tensor) -> None:
        """In the part that chooses the next token: sends it."""
        for source, target in self._given:
            self.send(token, source, target)

    def hand_off(self, streams_TME: Tensor, source: torch.device, target: torch.device) -> Arrival:
        """Up to 8 tokens by a channel, at the end of the part that has computed them, else to the
        arrival memory of the state.
        """
        if self._channels is not None:
            last = self._parts.pop()
            assert isinstance(last, Part), "streams are computed"
            self.send(streams_TME, source, target)
            stop = len(self._recordings[source].items)
            self._parts.append(replace(last, stop=stop))
            return lambda: self.receive(streams_TME, source, target)
        self._recordings[source].keep(streams_TME)
        self._parts.append(Transfer(source, target, streams_TME))
        self._undrained = source
        arrived_TME = self._state.arrivals[source, target][: self._tokens]
        return lambda: arrived_TME

    @property
    def has_channels(self) -> bool:
        """Whether the devices of the step send each other rows."""
        return self._channels is not None

    def send(self, rows: Tensor, source: torch.device, target: torch.device) -> None:
        """In a part of ``source``."""
        self._uses[source, target] += 1
        send_rows(self._recordings[source], self._channel(source, target), rows)

    def receive(self, like: Tensor, source: torch.device, target: torch.device) -> Tensor:
        """In a part of ``target``, what was sent: rows of the shape of those."""
        rows = self._recordings[target].empty_like(like)
        receive_rows(self._recordings[target], self._channel(source, target), rows)
        return rows

    def receive_columns(self, rows: Tensor, source: torch.device, target: torch.device) -> None:
        """``receive`` into columns of a buffer, of what comes soon."""
        receive_rows(self._recordings[target], self._channel(source, target), rows, early=True)

    def _channel(self, source: torch.device, target: torch.device) -> Channel:
        assert self._channels is not None, "devices send each other rows"
        return self._channels.between(source, target)

    def finish(self, outputs: Outputs, token: Tensor | None, head: torch.device) -> RecordedStep:
        """The step, whose outputs are kept."""
        for tensor in (*outputs, token):
            if tensor is not None:
                self._recordings[head].keep(tensor)
        parts = tuple(self._parts)
        kept = () if self._traced is None else tuple(self._traced.kept)
        uses = max(self._uses.values(), default=0)
        channels = self._channels if uses else None
        step = (self._tokens, head, parts, self._recordings, outputs, kept, token)
        return RecordedStep(*step, channels, uses)


def record_step(
    model: Transformer,
    state: DecodeState,
    recorder: StepRecorder,
    loop: TokenLoopMemory | None = None,
    along: tuple[Along, SamplerState] | None = None,
    logits: bool = True,
) -> RecordedStep:
    """The whole model. Steps of up to 8 tokens have logits, unless ``logits`` is False; one of a
    single token has with ``loop`` also the choice of the next token and its way back into the
    input. ``along``: what has parts behind the model, and the sampler for them.
    """
    values = None if along is None else recorder.listen(along[0])
    outputs = model(recorder, state, logits and recorder.tokens_of_step <= MAX_DECODE_TOKENS)
    head = model.head_device
    token = None
    if along is not None and values is not None:
        along[0].record(recorder, values)
    if loop is not None and outputs.logits_TV is not None and recorder.tokens_of_step == 1:
        with recorder.part("sample", head) as ops:
            position_1 = state.positions_1[head]
            token = loop.sampler.choose(ops, outputs.logits_TV[-1], position_1)
            next_1 = recorder.tokens(head)
            # Before the way to the host, which takes longer.
            recorder.pass_on(token)
            ops.store_token(token, position_1, next_1, loop.ring_R, state.nan_1)
    if along is not None and outputs.logits_TV is not None:
        along[0].record_choice(recorder, outputs.logits_TV, token, along[1])
    return recorder.finish(outputs, token, head)


def record_logits(
    model: Transformer,
    table: RecordedTable,
    target: Target,
    hidden_TE: Tensor,
    state: DecodeState,
    sampler: SamplerState,
) -> RecordedStep:
    """Logits of final hidden states that lie in ``hidden_TE``, and the token sampled from the last
    row.
    """
    head = model.head_device
    recorder = StepRecorder(table, {head: target}, state, {head: hidden_TE})
    with recorder.part("head", head) as ops:
        begin_logits(recorder.recording(head))
        ranks_logits = model.head.logits(ops, hidden_TE)
    with recorder.part("logits", head) as ops:
        logits_TV = ops.gather_logits(ranks_logits)
    token = None
    if hidden_TE.shape[0] == 1:
        with recorder.part("sample", head) as ops:
            token = sampler.choose(ops, logits_TV[-1], state.positions_1[head])
    return recorder.finish(Outputs(hidden_TE, logits_TV), token, head)
