"""One layer by itself: loaded, run on given streams, dropped. Its order is that of the model
(``dsv4.model.Segment``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.caches.layer import AttentionState
from dsv4.caches.rows import RowCache
from dsv4.caches.state import DecodeState
from dsv4.checkpoint.layer_weights import LayerSource
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.compiler import compile_ahead
from dsv4.launch.target import Target
from dsv4.layers.block import Block
from dsv4.layers.values import Seen, Watch
from dsv4.layers.weights import ReadOnce, WeightReader
from dsv4.model import Arrival, Outputs, Segment
from dsv4.ops.tables import DirectTable, RecordedTable, Table
from dsv4.step.chunks import split_ids
from dsv4.step.direct import DirectParts, DirectValues
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed
from dsv4.step.traced_values import TracedValues
from dsv4.trace.steps import ShownValues

Values = Mapping[str, Tensor]


class Given(NamedTuple):
    """What enters a layer: streams ``[T, M, E]`` of the tokens at ``position`` and behind it.
    Caches hold random rows of the tokens before it.
    """

    token_ids: list[int]
    streams_TME: Tensor
    position: int = 0


@dataclass(frozen=True)
class OneLayer:
    """A layer on one device, with the ops that run it. ``engine`` says how: dtypes of values and
    caches.
    """

    config: ModelConfig
    engine: EngineConfig
    table: Table
    segment: Segment

    @classmethod
    def load(
        cls,
        source: LayerSource,
        layer: int,
        engine: EngineConfig,
        table: Table,
        device: torch.device,
    ) -> "OneLayer":
        """With the torch ops routed experts stay where they are, and are read one at a time as they
        are used; unless activations are rounded, which takes a look at all experts.
        """
        config = source.config
        on_demand = isinstance(table, DirectTable) and engine.prefill_activations == "bf16"
        weights = source.weights(layer, device, on_demand)
        block = Block.build(
            config,
            WeightReader(ReadOnce(weights), table.packing, f"layers.{layer}."),
            config.compress_ratios[layer],
            config.hash_layers[layer],
            COMPUTE_DTYPES[engine.compute_dtype],
        )
        return cls(config, engine, table, Segment(device, (layer,), (block,)))

    @torch.inference_mode()
    def run(self, given: Given, chunk: int) -> Values:
        """Every named value of the layer on the host, of all tokens, ``chunk`` of them per step."""
        state = layer_state(self.config, self.engine, self.segment, given, chunk)
        compute = self._direct if isinstance(self.table, DirectTable) else self._recorded
        return compute(state, given, chunk)

    def _direct(self, state: DecodeState, given: Given, chunk: int) -> Values:
        assert isinstance(self.table, DirectTable)
        found = ShownValues()
        for ids, streams_TME in _chunks(given, chunk):
            values = DirectValues(Watch(found.add), state, len(ids))
            parts = DirectParts(self.table.ops, torch.tensor(ids, dtype=torch.int64), values)
            state.advance(len(ids))
            entering_TME = self._entering(streams_TME)
            self.segment(parts, state, _arrival(entering_TME), {})
        return found.joined()

    def _recorded(self, state: DecodeState, given: Given, chunk: int) -> Values:
        assert isinstance(self.table, RecordedTable)
        found = ShownValues()
        steps: dict[int, _LayerStep] = {}
        for ids, streams_TME in _chunks(given, chunk):
            if len(ids) not in steps:
                entering_TME = self._entering(streams_TME)
                step = _LayerStep(self.segment, self.table, state, entering_TME, found.add)
                steps[len(ids)] = step
            steps[len(ids)].run(ids, streams_TME)
        return found.joined()

    def _entering(self, streams_TME: Tensor) -> Tensor:
        dtype = COMPUTE_DTYPES[self.engine.compute_dtype]
        return streams_TME.to(self.segment.device, dtype, copy=True)


def _arrival(streams_TME: Tensor) -> Arrival:
    return lambda: streams_TME


def record_layer(
    segment: Segment,
    recorder: StepRecorder,
    state: DecodeState,
    entering_TME: Tensor,
) -> RecordedStep:
    """The step of one segment on streams that lie in ``entering_TME``."""
    streams_TME = segment(recorder, state, _arrival(entering_TME), {})
    return recorder.finish(Outputs(streams_TME, None), None, segment.device)


class _LayerStep:
    """A recorded step of one length that can run."""

    def __init__(
        self,
        segment: Segment,
        table: RecordedTable,
        state: DecodeState,
        entering_TME: Tensor,
        seen: Seen,
    ) -> None:
        device = segment.device
        self._state = state
        self._entering_TME = entering_TME
        self._feed = TokenFeed([device], device, entering_TME.shape[0])
        targets = {device: Target.of(device)}
        values = TracedValues(lambda _: True, state, seen)
        recorder = StepRecorder(table, targets, state, self._feed.inputs, values)
        recorded = record_layer(segment, recorder, state, entering_TME)
        compile_ahead(recorded.kernels())
        self._step = Step(recorded, {}, {}, self._feed)

    def run(self, ids: list[int], streams_TME: Tensor) -> None:
        """Appends as many tokens as the step has."""
        self._feed.put(ids)
        self._entering_TME.copy_(streams_TME)
        self._state.advance(len(ids))
        self._step.run(len(ids))


def _chunks(given: Given, chunk: int) -> list[tuple[list[int], Tensor]]:
    ids = split_ids(given.token_ids, [len(given.token_ids)], chunk)
    streams = given.streams_TME.split([len(part) for part in ids])
    return list(zip(ids, streams, strict=True))


def layer_state(
    config: ModelConfig, engine: EngineConfig, segment: Segment, given: Given, chunk: int
) -> DecodeState:
    """The caches of a segment of one layer, at the position of what is given."""
    (layer,) = segment.layers
    alone = replace(
        config,
        num_hidden_layers=1,
        compress_ratios=config.compress_ratios[layer : layer + 1],
        hash_layers=config.hash_layers[layer : layer + 1],
    )
    room = given.position + len(given.token_ids)
    state = DecodeState.allocate(
        alone, replace(engine, prefill_chunk=chunk), room, (segment.device,)
    )
    (caches,) = state.layers
    _fill(caches, given.position)
    state.set_position(given.position)
    # The segment asks for its layer by its index in the model.
    return replace(state, layers=(caches,) * (layer + 1), furthest=given.position)


def _fill(caches: AttentionState, position: int) -> None:
    """Random rows of standard deviation 1 of all tokens before ``position``: the same ones whatever
    the device and the length of a step.
    """
    generator = Generator().manual_seed(position)
    keys = caches.keys
    recent = torch.arange(max(0, position - keys.window), position)
    _write_random(keys.ring, recent % keys.ring.slots, generator)
    for part in (caches.compressed, caches.index):
        if part is not None:
            _write_random(part.rows, torch.arange(position // keys.ratio), generator)
            for inputs in (part.ring.kv, part.ring.score):
                values = torch.randn(inputs.shape, generator=generator)
                inputs.copy_(values if position else torch.zeros_like(values))


def _write_random(cache: RowCache, slots: Tensor, generator: Generator) -> None:
    rows = torch.randn((len(slots), cache.width), generator=generator)
    cache.write(slots.to(cache.data.device), rows.to(cache.data.device))
