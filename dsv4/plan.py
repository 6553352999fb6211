"""Memory plan: what every device will hold, computed before any weight is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.checkpoint import ParameterDescription
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import UserError
from dsv4.parameters import Parameter, Role
from dsv4.placement import Placement, table_name
from dsv4.state import layer_state_bytes

DEFAULT_MAX_CONTEXT = 8192
PACKING_COPIES = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of one device: weights, the decode state, and ``ops_bytes``: what the op table needs besides.

    The torch ops keep every matrix decoded to float32 as well. The CUDA ops keep only the packed weights; packing the
    largest matrix takes a few copies of it on the side.
    """

    device: torch.device
    layers: int
    weight_bytes: int
    ops_bytes: int
    state_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.ops_bytes + self.state_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """One ``DevicePlan`` per device; ``str()`` is the table the driver prints for ``--plan``."""

    devices: tuple[DevicePlan, ...]
    max_context: int

    @property
    def total_bytes(self) -> int:
        return sum(device.total_bytes for device in self.devices)

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    def __str__(self) -> str:
        header = f"{'device':<8}{'layers':>7}{'weights':>11}{'ops':>11}{'state':>11}{'total':>11}{'available':>11}"
        rows = [
            f"{device.device!s:<8}{device.layers:>7}"
            + "".join(f"{size / _MIB:>11,.1f}" for size in _columns(device))
            + ("" if device.fits else "  does not fit")
            for device in self.devices
        ]
        return "\n".join([f"memory plan in MiB for a context of {self.max_context:,} tokens", header, *rows])

    def refuse_if_too_large(self) -> None:
        """Raises ``UserError`` with the numbers of the first device that cannot hold its part."""
        for device in self.devices:
            if not device.fits:
                weights, ops, state, needed, available = (size // _MIB for size in _columns(device))
                raise UserError(
                    f"memory: {device.device} needs {needed:,} MiB (weights {weights:,}, ops {ops:,}, state "
                    f"{state:,}), found {available:,} MiB available; use more GPUs or a smaller --max-context"
                )


def max_context_tokens(config: ModelConfig, engine: EngineConfig) -> int:
    """The context the caches are sized for. Raises ``UserError`` beyond what the model was made for."""
    if engine.max_context is None:
        return min(config.max_position_embeddings, DEFAULT_MAX_CONTEXT)
    if engine.max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UserError(
            f"--max-context: found {engine.max_context}, expected at most {limit} (max_position_embeddings)"
        )
    return engine.max_context


def plan_memory(
    config: ModelConfig, engine: EngineConfig, placement: Placement, stored: Iterable[ParameterDescription]
) -> MemoryPlan:
    """Sums the checkpoint's ``stored`` parameters and the decode state over the devices of ``placement``."""
    max_context = max_context_tokens(config, engine)
    devices = tuple(dict.fromkeys(placement.layer_devices))
    weights, ops, state = (dict.fromkeys(devices, 0) for _ in range(3))
    on_torch = table_name(engine, devices) == "torch"
    for description in stored:
        device = placement.device_of(description.parameter.name)
        weights[device] += description.nbytes
        if on_torch:
            ops[device] += decoded_bytes(description.parameter)
        else:
            ops[device] = max(ops[device], PACKING_COPIES * description.nbytes)
    for ratio, device in zip(config.compress_ratios, placement.layer_devices, strict=True):
        state[device] += layer_state_bytes(config, engine, max_context, ratio)
    return MemoryPlan(
        tuple(
            DevicePlan(
                device,
                placement.layer_devices.count(device),
                weights[device],
                ops[device],
                state[device],
                available_bytes(device),
            )
            for device in devices
        ),
        max_context,
    )


def decoded_bytes(parameter: Parameter) -> int:
    """Bytes of the float32 copy the torch ops make of a matrix; the embedding is looked up as stored, and
    the speculative module is not decoded."""
    if parameter.role not in (Role.LINEAR, Role.EXPERT, Role.FLOOR) or parameter.name.startswith(("embed.", "mtp.")):
        return 0
    return 4 * torch.Size(parameter.shape).numel()


def available_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or memory the operating system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _columns(device: DevicePlan) -> tuple[int, ...]:
    return (
        device.weight_bytes,
        device.ops_bytes,
        device.state_bytes,
        device.total_bytes,
        device.available_bytes,
    )
