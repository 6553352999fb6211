"""A checkpoint before any weight is read: its parameters, their devices and the memory plan."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dsv4.checkpoint import (
    Checkpoint,
    ParameterDescription,
    describe,
    held_by,
    load_ranks,
    open_checkpoint,
)
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.target import Target
from dsv4.layers.weights import ReadOnce
from dsv4.opened_draft import OpenedDraft
from dsv4.ops.tables import TABLES, DirectTable, Table
from dsv4.parallel.devices import (
    check_cuda_graph,
    engine_devices,
    table_name,
    table_on,
    with_device_defaults,
)
from dsv4.parallel.exchange_check import check_exchange
from dsv4.parallel.placement import Placement, bytes_by_layer
from dsv4.parallel.sharding import check_divisible
from dsv4.plan import MemoryPlan, max_context_tokens, plan_memory
from dsv4.step.planned import PlannedSteps

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The contents of a checkpoint, their placement and whether they fit.

    ``config`` has the keys of the ``draft`` module, where there is one. ``steps``: the recorded
    steps of the CUDA ops; None with the torch ops.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    draft: OpenedDraft | None
    placement: Placement
    table: Table
    steps: PlannedSteps | None
    plan: MemoryPlan

    @classmethod
    def open(
        cls, path: str | Path, engine: EngineConfig, gpu_memory: int | None = None
    ) -> "OpenedCheckpoint":
        """Reads the headers of a checkpoint folder. Raises ``UserError`` for a bad folder and for
        a GPU or an installation without the ops that ``engine`` asks for.

        ``gpu_memory``: plans for Hopper GPUs with this many bytes each, which need not be there.
        """
        absent = gpu_memory is not None
        checkpoint = open_checkpoint(path)
        config = ModelConfig.from_dict(
            checkpoint.raw_config, str(checkpoint.folder / "config.json")
        )
        stored = describe(checkpoint, config)
        all_devices = engine_devices(engine, absent)
        ops = TABLES[table_name(engine, all_devices)]
        draft = OpenedDraft.open(checkpoint, config, engine, ops)
        draft_bytes = 0
        if draft is not None:
            config = draft.config
            stored += draft.describe()
            draft_bytes = draft.state_bytes(engine)
        formats = [(parameter, format) for parameter, format, _ in stored]
        sizes = ((description.parameter.name, description.nbytes) for description in stored)
        layer_bytes = bytes_by_layer(sizes, config.num_hidden_layers)
        placement = Placement.of(engine, all_devices, layer_bytes)
        check_divisible(config, formats, placement.ranks)
        devices = placement.devices
        engine = with_device_defaults(engine, devices)
        check_cuda_graph(engine, devices)
        table = ops if absent else table_on(engine, devices)
        held = held_by(stored, placement.ranks, 0)
        steps = _plan_steps(config, engine, held, table, placement, absent)
        plan = plan_memory(config, engine, placement, stored, steps, gpu_memory, draft_bytes)
        return cls(checkpoint, config, draft, placement, table, steps, plan)

    def read(self, progress: Progress | None, packing: Progress | None) -> list[ReadOnce]:
        """What each rank holds of the weights, on its device; ``progress(done_bytes,
        total_bytes)`` is told as they are read, ``packing`` as those of rank 0 are taken. Raises
        ``UserError`` for GPUs whose ranks cannot exchange words.
        """
        if self.placement.ranks > 1 and self.steps is not None:
            check_exchange(self.placement.devices)
        draft = self.draft
        is_own = draft is not None and draft.checkpoint is self.checkpoint
        mtp = draft.kind if draft is not None and is_own else None
        first, *others = load_ranks(
            self.checkpoint, self.config, self.placement, mtp=mtp, progress=progress
        )
        if draft is not None and not is_own:
            first |= draft.load(self.placement)
        return [ReadOnce(first, packing), *map(ReadOnce, others)]


def _plan_steps(
    config: ModelConfig,
    engine: EngineConfig,
    held: Iterable[ParameterDescription],
    table: Table,
    placement: Placement,
    absent: bool,
) -> PlannedSteps | None:
    """The steps of rank 0 with a recorded table on the GPUs of this machine, or on ``absent`` ones,
    without memory; None for the torch ops. ``held``: what the rank holds.
    """
    if isinstance(table, DirectTable):
        return None
    target_of = Target.of_absent if absent else Target.of
    devices = placement.of_rank(0).layer_devices
    targets = {device: target_of(device) for device in dict.fromkeys(devices)}
    context = max_context_tokens(config, engine)
    formats = [(parameter, format) for parameter, format, _ in held]
    return PlannedSteps.of(config, engine, formats, table, targets, placement, context)
