"""Placement: which device owns which layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dsv4.config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops import TableName
from dsv4.parameters import layer_of


@dataclass(frozen=True)
class Placement:
    """Pipeline placement: ``layer_devices[l]`` owns layer l; the embedding is with the first layer, the rest with the
    last.

    Layers are contiguous: a token crosses from one device to the next once per boundary, not once per layer.
    """

    layer_devices: tuple[torch.device, ...]

    @classmethod
    def pipeline(cls, layer_bytes: Sequence[int], devices: Sequence[torch.device]) -> "Placement":
        """Contiguous segments balanced by bytes: a layer goes where the middle of its bytes falls in equal shares,
        moved as little as it takes to leave no device without a layer (while there are layers).
        """
        layers, total = len(layer_bytes), sum(layer_bytes)
        chosen: list[int] = []
        for layer, (end, size) in enumerate(zip(accumulate(layer_bytes), layer_bytes, strict=True)):
            share = int((end - size / 2) * len(devices) / total)
            first_of_the_rest = len(devices) - (layers - layer)
            chosen.append(min(max(share, first_of_the_rest), chosen[-1] + 1 if chosen else 0, len(devices) - 1))
        return cls(tuple(devices[index] for index in chosen))

    def device_of(self, name: str) -> torch.device:
        """The device that owns a parameter of ``dsv4.parameters``."""
        layer = layer_of(name)
        if layer is not None:
            return self.layer_devices[layer]
        return self.layer_devices[0 if name.startswith("embed.") else -1]


def table_name(engine: EngineConfig, devices: Sequence[torch.device]) -> TableName:
    """The op table an ``EngineConfig`` asks for on ``devices``. Raises ``UserError`` for CUDA ops on a CPU."""
    on_cuda = devices[0].type == "cuda"
    if engine.ops == "cuda" and not on_cuda:
        raise UserError("--ops: found 'cuda' on the CPU, expected 'torch' or a CUDA device")
    if engine.ops == "auto":
        return "cuda" if on_cuda and engine.compute_dtype == "bfloat16" else "torch"
    return engine.ops


def engine_devices(engine: EngineConfig) -> tuple[torch.device, ...]:
    """The devices an ``EngineConfig`` asks for. Raises ``UserError`` when this machine does not have them."""
    if engine.parallel == "tensor" and engine.gpus > 1:
        raise UserError(
            "--parallel: found 'tensor' with more than one GPU, expected 'pipeline' (not available in this version)"
        )
    available = torch.cuda.device_count()
    if engine.device == "cpu" or (engine.device == "auto" and available == 0):
        if engine.gpus > 1:
            raise UserError(f"--gpus: found {engine.gpus}, expected 1 when running on the CPU")
        return (torch.device("cpu"),)
    if available < engine.gpus:
        raise UserError(f"--gpus: found {engine.gpus}, expected at most {available} (CUDA devices on this machine)")
    return tuple(torch.device("cuda", index) for index in range(engine.gpus))
