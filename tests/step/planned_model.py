"""Whole models on weights and caches that have no memory, recorded without a GPU; and stand-ins
that say what a step would queue.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.checkpoint import Geometry, Layout, describe, geometry_config, open_checkpoint
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Item
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.layers.values import Wants
from dsv4.model import Transformer
from dsv4.ops.tables import CUDA_TABLE, RecordedTable, Table
from dsv4.ops.trees import tensors_in
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.plan import max_context_tokens
from dsv4.sampling import SamplerState
from dsv4.step.parts import AnyPart, Part, Transfer
from dsv4.step.planned import StoredFormats, planned_weight
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import RING_TOKENS, StepRecorder, TokenLoopMemory, record_step
from dsv4.step.step import Step
from dsv4.step.token_feed import given_by_host
from dsv4.step.traced_values import TracedValues
from dsv4.turns import Turns
from dsv4.weights.parameters import parameters
from dsv4.weights.shared_rows import RowShare, shares_of

META = torch.device("meta")
GPUS = tuple(torch.device("cuda", index) for index in range(8))
TARGETS = {device: Target(device, "sm_90a", 132) for device in GPUS}
ENGINE = EngineConfig(prefill_chunk=512, max_context=8192)


@dataclass(frozen=True)
class PlannedModel:
    """A model and its state, as ``dsv4.step.planned`` makes them. ``layer_devices[l]`` owns layer
    l.
    """

    config: ModelConfig
    table: RecordedTable
    layer_devices: tuple[torch.device, ...]
    model: Transformer
    state: DecodeState
    loop: TokenLoopMemory
    targets: Mapping[torch.device, Target] = field(default_factory=lambda: TARGETS)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        stored: StoredFormats,
        layer_devices: tuple[torch.device, ...],
        engine: EngineConfig = ENGINE,
        table: RecordedTable = CUDA_TABLE,
    ) -> "PlannedModel":
        weights = {
            parameter.name: planned_weight(parameter, format) for parameter, format in stored
        }
        model = Transformer.build(config, weights, table.packing, layer_devices, torch.bfloat16)
        context = max_context_tokens(config, engine)
        placement = Placement.of_layers(layer_devices)
        state = allocate_state(config, engine, context, placement, planned=True)
        ring = torch.zeros(RING_TOKENS, dtype=torch.int64, device=META)
        loop = TokenLoopMemory(SamplerState.allocate(META), ring)
        return cls(config, table, layer_devices, model, state, loop)

    def on(self, table: Table) -> "PlannedModel":
        """The same with other ops of the same layouts."""
        assert isinstance(table, RecordedTable)
        return replace(self, table=table)

    def for_gpus(self, architecture: str, multiprocessors: int) -> "PlannedModel":
        """The same on other GPUs."""
        targets = {device: Target(device, architecture, multiprocessors) for device in GPUS}
        return replace(self, targets=targets)

    def record(
        self, tokens: int, traced: TracedValues | None = None, logits: bool = True
    ) -> RecordedStep:
        """A step: with logits up to 8 tokens, with the choice of a token where there is one."""
        inputs = {
            device: torch.empty(tokens, dtype=torch.int64, device=META)
            for device in self.state.devices
        }
        given = given_by_host(inputs, self.model.head_device, self.state.channels)
        recorder = StepRecorder(self.table, self.targets, self.state, inputs, traced)
        recorder.await_tokens(given)
        return record_step(self.model, self.state, recorder, self.loop, logits=logits)

    def record_traced(self, tokens: int, wants: Wants = lambda name: True) -> RecordedStep:
        """A step that keeps the values that ``wants`` names on its devices."""
        return self.record(tokens, TracedValues(wants, self.state))

    @property
    def shares(self) -> tuple[RowShare, ...]:
        """Those of the head."""
        return shares_of(self.model.head.lm_head)

    def owners(self) -> dict[int, torch.device]:
        """Which device has the memory of a weight or a buffer of the state, by storage."""
        found: dict[int, torch.device] = {}

        def own(value: object, device: torch.device) -> None:
            found.update({storage_key(tensor): device for tensor in tensors_in(value)})

        own(self.model.embed, self.layer_devices[0])
        own(self.model.head, self.layer_devices[-1])
        for share in self.shares:
            own(share.rows, share.device)
        layers = zip(self.model.blocks, self.state.layers, self.layer_devices, strict=True)
        for block, caches, device in layers:
            own((block, caches), device)
        for device in self.state.devices:
            own(self.state.place(device), device)
        for (_, target), arrived in self.state.arrivals.items():
            own(arrived, target)
        sampler = self.loop.sampler
        own((sampler.settings_4, sampler.seed_1, self.loop.ring_R), self.layer_devices[-1])
        return found


def geometry(
    name: Geometry,
    layout: Layout = "nvfp4-experts",
    layers: int | None = None,
    gpus: int = 1,
    round_robin: bool = False,
    engine: EngineConfig = ENGINE,
    table: RecordedTable = CUDA_TABLE,
) -> PlannedModel:
    """A published geometry in a layout, its layers spread evenly over ``gpus``."""
    config = ModelConfig.from_dict(geometry_config(name, layers))
    stored = [(p, format_in(layout, p)) for p in parameters(config).values()]
    return PlannedModel.of(config, stored, _spread(config, gpus, round_robin), engine, table)


def demo(gpus: int = 1) -> PlannedModel:
    """The embedded checkpoint, from its headers."""
    checkpoint = open_checkpoint(CHECKPOINT)
    config = ModelConfig.from_dict(checkpoint.raw_config)
    stored = [(parameter, format) for parameter, format, _ in describe(checkpoint, config)]
    return PlannedModel.of(config, stored, _spread(config, gpus, False))


def _spread(config: ModelConfig, gpus: int, round_robin: bool) -> tuple[torch.device, ...]:
    layers = config.num_hidden_layers
    if round_robin:
        return Placement.round_robin(layers, GPUS[:gpus]).layer_devices
    return Placement.pipeline([1] * layers, GPUS[:gpus]).layer_devices


def compute_parts(step: RecordedStep) -> list[Part]:
    """The parts without the hand-offs."""
    return [part for part in step.parts if isinstance(part, Part)]


def items_of(parts: Iterable[AnyPart]) -> list[tuple[Any, ...]]:
    """Every item by device and index, every hand-off by its devices, in order."""
    found: list[tuple[Any, ...]] = []
    for part in parts:
        if isinstance(part, Transfer):
            found.append((part.source, part.target))
        elif isinstance(part, Part):
            found += [(part.device, index) for index in range(part.start, part.stop)]
    return found


def runs(item: Item, dense: bool) -> bool:
    """Whether a decode step that is dense, or not, queues it."""
    return isinstance(item, Call) or not dense or item.dense_shape is not None


class FakeProgram:
    """Stands for ``Program``: notes items instead of queueing them."""

    def __init__(self, log: list[Any], recording: Recording) -> None:
        self.device = recording.target.device
        self._log = log
        self._recording = recording

    def run(self, tokens: int, start: int, stop: int, dense: bool = False) -> None:
        items = enumerate(self._recording.items[start:stop], start)
        self._log += [(self.device, index) for index, item in items if runs(item, dense)]

    def tensor(self, recorded: Tensor) -> Tensor:
        return recorded


class FakeHandOff:
    """Stands for ``HandOff``."""

    def __init__(self, log: list[Any], source: torch.device, target: torch.device) -> None:
        self._log = log
        self._ends = (source, target)
        self.rows: list[int] = []

    def send(self, tensor: Tensor) -> None:
        self.rows.append(tensor.shape[0])
        self._log.append(self._ends)

    def drain(self) -> None:
        self._log.append(("drain", *self._ends))


def fake_step(
    planned: PlannedModel, step: RecordedStep, monkeypatch: pytest.MonkeyPatch
) -> tuple[Step, list[Any], dict[Any, FakeHandOff]]:
    """``step`` on stand-ins, the log of what it queues, and its hand-offs."""
    log: list[Any] = []
    monkeypatch.setattr("dsv4.step.step.Program", lambda recording, _: FakeProgram(log, recording))
    monkeypatch.setattr("torch.cuda.device", _NoDevice)
    monkeypatch.setattr("torch.cuda.Event", object)
    monkeypatch.setattr(Turns, "taken", lambda _: nullcontext())
    hand_offs: Any = {ends: FakeHandOff(log, *ends) for ends in planned.state.arrivals}
    return Step(step, {}, hand_offs), log, hand_offs


class _NoDevice:
    """Stands for ``torch.cuda.device`` where there is none."""

    def __init__(self, device: torch.device) -> None:
        """Any device."""

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, *_: object) -> None:
        """Nothing changes."""
