"""Memory plan: what every device will hold, computed before any weight is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES, layer_state_bytes, step_tokens
from dsv4.checkpoint import ParameterDescription, held_by
from dsv4.checkpoint.staging import staging_bytes, staging_on
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.torch_workspace import TorchStep
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import arrival_bytes, channel_bytes, exchange_bytes
from dsv4.parallel.sharding import local_config
from dsv4.step.planned import PlannedSteps
from dsv4.weights.packing_bytes import (
    dequantized_bytes,
    dequantizing_bytes,
    native_copy_bytes,
    packing_bytes,
    packing_with_native_bytes,
)

DEFAULT_MAX_CONTEXT = 8192
_MIB = 1 << 20
_GIB = 1 << 30
_GB = 10**9
# The CUDA driver's share for kernels and graphs, and torch's for blocks between those in use: 0.98
# to 1.08 GB on each of two H200, with all layers and graphs of Flash (docs/long_context.md).
CUDA_RESERVE_BYTES = 1152 << 20


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of one device: weights; ``ops_bytes``, what the op table keeps in addition (the torch
    ops: every matrix dequantized to float32; the CUDA ops: native copies, where there are some);
    the decode state, with the memory in which streams, or the parts of sums, arrive from other
    devices; and ``work_bytes``, which come and go: packing the largest weight or the longest step,
    whichever needs more, and a reserve for the CUDA driver. ``rank``: of which rank, where several
    share the layers.
    """

    device: torch.device
    layers: int
    weight_bytes: int
    ops_bytes: int
    state_bytes: int
    work_bytes: int
    available_bytes: int
    rank: int | None = None

    @property
    def name(self) -> str:
        return str(self.device) if self.rank is None else f"rank {self.rank} ({self.device})"

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.ops_bytes + self.state_bytes + self.work_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """One ``DevicePlan`` per device, or per rank; ``str()`` is the table the driver prints for
    ``--plan``. ``native_copies``: ``ops_bytes`` are those of native copies, of all layers or of
    none. ``staging_bytes``: pinned memory of the host that weights pass on their way to GPUs.
    """

    devices: tuple[DevicePlan, ...]
    max_context: int
    native_copies: bool = False
    staging_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(device.total_bytes for device in self.devices)

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    def __str__(self) -> str:
        in_gib = ("weights", "ops", "state", "work", "total", "available")
        names = (*in_gib, "total GB", "avail. GB")
        width = max(8, *(len(device.name) for device in self.devices))
        lines = [
            f"memory plan in GiB (2^30 bytes; GB are 10^9) for a context of "
            f"{self.max_context:,} tokens",
            f"{'device':<{width}}{'layers':>7}" + "".join(f"{name:>11}" for name in names),
        ]
        for device in self.devices:
            sizes = [size / _GIB for size in _columns(device)]
            sizes += [device.total_bytes / _GB, device.available_bytes / _GB]
            row = f"{device.name:<{width}}{device.layers:>7}"
            row += "".join(f"{size:>11,.3f}" for size in sizes)
            lines.append(row + ("" if device.fits else "  does not fit"))
        if self.staging_bytes:
            staging = self.staging_bytes / _GIB
            lines.append(f"loading takes {staging:,.3f} GiB of pinned memory on the host")
        return "\n".join(lines)

    def refuse_if_too_large(self) -> None:
        """Raises ``UserError`` with the numbers of the first device that cannot hold its part."""
        for device in self.devices:
            if not device.fits:
                weights, ops, state, work, needed, available = (
                    size // _MIB for size in _columns(device)
                )
                raise UserError(
                    f"memory: {device.name} needs {needed:,} MiB (weights {weights:,}, "
                    f"ops {ops:,}, state {state:,}, work {work:,}), "
                    f"found {available:,} MiB available; use more GPUs or a smaller "
                    f"EngineConfig.max_context or EngineConfig.prefill_chunk{self._without_copies}"
                )

    @property
    def _without_copies(self) -> str:
        """What else a refusal advises."""
        advice = ", or EngineConfig.prefill_activations='bf16', which needs no native copies"
        return advice if self.native_copies else ""


def max_context_tokens(config: ModelConfig, engine: EngineConfig) -> int:
    """The context the caches are sized for. Raises ``UserError`` beyond what the model was made
    for.
    """
    if engine.max_context is None:
        return min(config.max_position_embeddings, DEFAULT_MAX_CONTEXT)
    if engine.max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UserError(
            f"EngineConfig.max_context: found {engine.max_context}, "
            f"expected at most {limit} (max_position_embeddings)"
        )
    return engine.max_context


def plan_memory(
    config: ModelConfig,
    engine: EngineConfig,
    placement: Placement,
    stored: Iterable[ParameterDescription],
    steps: PlannedSteps | None,
    gpu_memory: int | None = None,
    draft_bytes: int = 0,
) -> MemoryPlan:
    """Sums the checkpoint's ``stored`` parameters, the decode state and the work over the devices,
    or the ranks, of ``placement``.

    ``config`` and ``stored`` are those of the whole model. ``steps``: the recorded steps of the
    CUDA ops, with several ranks those of rank 0; None plans for the torch ops. ``gpu_memory``:
    bytes of every device, in place of what this machine has. ``draft_bytes``: the caches of a draft
    module, on the last device of every rank.
    """
    max_context = max_context_tokens(config, engine)
    native = None if steps is None else steps.packing.native
    ranks = placement.ranks
    local = local_config(config, ranks)
    first = placement.of_rank(0)
    step = _torch_work(local, engine, first) if steps is None else steps.workspace_bytes()
    stored = list(stored)
    size = sum(nbytes for _, _, nbytes in stored)
    plans: list[DevicePlan] = []
    for rank in range(ranks):
        own = placement.of_rank(rank)
        held = held_by(stored, ranks, rank)
        found = _Bytes.of(local, engine, own, held, native, steps is None)
        found.state[own.layer_devices[-1]] += draft_bytes
        for device, nbytes in ({} if steps is None else steps.head_bytes).items():
            found.weights[device] += nbytes
        pairs = zip(own.layer_devices, first.layer_devices, strict=True)
        for device, alike in dict(pairs).items():
            # Once the weights are packed, steps take the place of what packing took.
            work = max(found.packing[device] + staging_on(device, size), step[alike])
            work += CUDA_RESERVE_BYTES if device.type == "cuda" else 0
            available = available_bytes(device) if gpu_memory is None else gpu_memory
            plans.append(
                DevicePlan(
                    device,
                    own.layer_devices.count(device),
                    found.weights[device],
                    found.ops[device],
                    found.state[device] + exchange_bytes(config, engine, ranks),
                    work,
                    available // placement.ranks_on(device),
                    rank if ranks > 1 else None,
                )
            )
    on_cuda = any(plan.device.type == "cuda" for plan in plans)
    staging = staging_bytes(size) if on_cuda else 0
    return MemoryPlan(tuple(plans), max_context, native is not None, staging)


@dataclass(frozen=True)
class _Bytes:
    """What the devices of one rank hold, and what packing takes on them for a while."""

    weights: dict[torch.device, int]
    ops: dict[torch.device, int]
    state: dict[torch.device, int]
    packing: dict[torch.device, int]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        engine: EngineConfig,
        placement: Placement,
        stored: Iterable[ParameterDescription],
        native: str | None,
        torch_ops: bool,
    ) -> "_Bytes":
        devices = tuple(dict.fromkeys(placement.layer_devices))
        weights, ops, state, packing = (dict.fromkeys(devices, 0) for _ in range(4))
        for parameter, format, nbytes in stored:
            device = placement.device_of(parameter.name)
            weights[device] += nbytes
            if torch_ops:
                ops[device] += dequantized_bytes(parameter)
                peak = dequantizing_bytes(parameter, format)
            elif native is None:
                peak = packing_bytes(parameter, format, nbytes)
            else:
                ops[device] += native_copy_bytes(parameter, format, native == "nvfp4")
                peak = packing_with_native_bytes(parameter, format, nbytes)
            packing[device] = max(packing[device], peak)
        max_context = max_context_tokens(config, engine)
        for ratio, device in zip(config.compress_ratios, placement.layer_devices, strict=True):
            state[device] += layer_state_bytes(config, engine, max_context, ratio)
        for source, target in set(pairwise(placement.layer_devices)):
            state[target] += arrival_bytes(config, engine) if source != target else 0
        if len(devices) > 1:
            for device, nbytes in channel_bytes(config, engine, placement).items():
                state[device] += nbytes
        return cls(weights, ops, state, packing)


def _torch_work(
    config: ModelConfig, engine: EngineConfig, placement: Placement
) -> dict[torch.device, int]:
    """The most that the torch ops hold in any layer of each device."""
    max_context = max_context_tokens(config, engine)
    itemsize = COMPUTE_DTYPES[engine.compute_dtype].itemsize
    tokens = min(step_tokens(engine), max_context)
    work: dict[torch.device, int] = {}
    for ratio, device in zip(config.compress_ratios, placement.layer_devices, strict=True):
        step = TorchStep(config, itemsize, tokens, max_context, ratio)
        work[device] = max(work.get(device, 0), step.workspace)
    return work


def available_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or memory the operating system can give without swapping.

    Raises ``UserError`` for a CUDA device that cannot be used, e.g. one that is full.
    """
    if device.type == "cuda":
        try:
            return torch.cuda.mem_get_info(device)[0]
        except RuntimeError as error:
            raise UserError(f"{device}: cannot be used ({str(error).splitlines()[0]})") from None
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _columns(device: DevicePlan) -> tuple[int, ...]:
    return (
        device.weight_bytes,
        device.ops_bytes,
        device.state_bytes,
        device.work_bytes,
        device.total_bytes,
        device.available_bytes,
    )
