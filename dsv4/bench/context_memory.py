"""Memory of a published geometry by the length of its context: what is planned, from the geometry
alone, and what an engine allocates.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4.bench.geometry_bytes import layer_bytes, stored_bytes
from dsv4.caches.allocation import prefill_tokens
from dsv4.checkpoint import Layout, ParameterDescription, held_by
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.launch.target import Target
from dsv4.ops.tables import DirectTable, RecordedTable, Table
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.parallel.received_bytes import channel_bytes, exchange_bytes
from dsv4.plan import CUDA_RESERVE_BYTES, MemoryPlan, plan_memory
from dsv4.step.planned import PlannedSteps
from dsv4.step.steps import RecordedSteps
from dsv4.weights.parameters import parameters


def described(config: ModelConfig, layout: Layout) -> list[ParameterDescription]:
    """Every parameter of a geometry as a checkpoint in ``layout`` stores it."""
    return [
        ParameterDescription(one, format_in(layout, one), stored_bytes(one, layout))
        for one in parameters(config).values()
    ]


def placed(
    config: ModelConfig, layout: Layout, engine: EngineConfig, devices: Sequence[torch.device]
) -> Placement:
    """Where ``engine`` puts the layers of a geometry."""
    return Placement.of(engine, devices, layer_bytes(config, layout))


def refuse_too_many_layers(config: ModelConfig, layout: Layout, engine: EngineConfig) -> None:
    """Raises ``UserError`` for a geometry that the host has no memory for, with the torch ops: the
    system ends a process that takes more than there is, where a GPU refuses.
    """
    placement = placed(config, layout, engine, [torch.device("cpu")])
    (plan,) = plan_memory(config, engine, placement, described(config, layout), None).devices
    if not plan.fits:
        raise UserError(
            f"--layers: found {config.num_hidden_layers}, which take {plan.total_bytes >> 20:,} "
            f"MiB, expected as many as {plan.available_bytes >> 20:,} MiB hold"
        )


@dataclass(frozen=True)
class PlacedGeometry:
    """A geometry on devices with the ``targets``; ``engine`` has its chunk."""

    config: ModelConfig
    layout: Layout
    engine: EngineConfig
    placement: Placement
    targets: Mapping[torch.device, Target]

    def plans(
        self, table: Table, lengths: Sequence[int], gpu_memory: int | None = None
    ) -> dict[int, tuple[MemoryPlan, dict[torch.device, int]]]:
        """The memory plan for each length, and the bytes of workspace by device.

        ``gpu_memory``: bytes of every GPU in place of what this machine has. Raises ``UserError``
        for the torch ops, which allocate as they go.
        """
        if isinstance(table, DirectTable):
            raise UserError("bench context: found the torch ops, expected those of CUDA")
        stored = described(self.config, self.layout)
        held = held_by(stored, self.placement.ranks, 0)
        formats = [(parameter, format) for parameter, format, _ in held]
        plans = {}
        for length in lengths:
            sized = replace(self.engine, max_context=length)
            given = self.config, sized, formats, table, self.targets, self.placement
            steps = PlannedSteps.of(*given)
            plan = plan_memory(self.config, sized, self.placement, stored, steps, gpu_memory)
            plans[length] = plan, steps.workspace_bytes()
        return plans


def planned_record(
    plans: Mapping[int, tuple[MemoryPlan, Mapping[torch.device, int]]],
) -> dict[str, dict[str, Any]]:
    """Bytes by length and device. ``total`` has the driver's reserve, and packing where that needs
    more than the workspace.
    """
    return {
        str(length): {
            device.name: {
                "weights": device.weight_bytes,
                "native_copies": device.ops_bytes,
                "state": device.state_bytes,
                "workspace": workspace.get(device.device, next(iter(workspace.values()))),
                "total": device.total_bytes,
                "available": device.available_bytes,
                "fits": device.fits,
            }
            for device in plan.devices
        }
        for length, (plan, workspace) in plans.items()
    }


def allocated_contexts(
    engine: Engine, placement: Placement, lengths: Sequence[int]
) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes that the caches, and that all steps of a second sequence of each length take on the
    weights of ``engine``, by device. Memory that other devices reach is not torch's and not
    counted.
    """
    return {str(length): _allocated(engine, placement, length) for length in lengths}


@torch.inference_mode()
def _allocated(engine: Engine, placement: Placement, length: int) -> dict[str, dict[str, int]]:
    assert isinstance(engine.table, RecordedTable)
    config = replace(engine.engine_config, max_context=length)
    before = _held(engine)
    state = allocate_state(engine.config, config, length, placement)
    with_state = _held(engine)
    tokens = prefill_tokens(config, length)
    steps = RecordedSteps(engine.models, state, engine.table, tokens)
    with_steps = _held(engine)
    reached = dict.fromkeys(before, exchange_bytes(engine.config, config, placement.ranks))
    if state.channels is not None:
        for device, nbytes in channel_bytes(engine.config, config, placement).items():
            reached[str(device)] += nbytes
    del state, steps
    gc.collect()
    return {
        device: {
            "state": with_state[device] - before[device],
            "steps": with_steps[device] - with_state[device],
            "exchange_not_counted": reached[device],
        }
        for device in before
    }


def _held(engine: Engine) -> dict[str, int]:
    devices = engine.state.all_devices
    return {str(device): torch.cuda.memory_allocated(device) for device in devices}


def engine_memory(engine: Engine) -> dict[str, dict[str, int]]:
    """Bytes by device: what torch holds now, the most it held since this was last asked, and what
    is taken of the device by whomever.
    """
    found = {}
    for device in engine.state.all_devices:
        free, total = torch.cuda.mem_get_info(device)
        found[str(device)] = {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "taken_of_device": total - free,
            "reserve_planned": CUDA_RESERVE_BYTES,
        }
        torch.cuda.reset_peak_memory_stats(device)
    return found
