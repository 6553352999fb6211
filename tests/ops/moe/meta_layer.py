"""Weights and routers of a layer without memory, for recordings that nothing runs."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.router import Router
from dsv4.weights.packed import (
    LANE_BYTES,
    LANES,
    PADDING,
    TILE_ROWS,
    PackedWeight,
    chunk_columns,
    padded,
)
from dsv4.weights.quant import QuantFormat, packed_shapes
from tests.ops.recorded import meta

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
LIMIT = 10.0


@dataclass(frozen=True)
class Geometry:
    """E, F, X and P, the formats of the routed and the shared experts, and how the layer routes."""

    width: int
    inner: int
    experts: int
    per_token: int = 6
    formats: tuple[QuantFormat, QuantFormat] = (NVFP4, FP8)
    hashed: bool = False

    def router(self) -> Router[PackedWeight]:
        """A router of this geometry."""
        gate = weight(BF16, self.experts, self.width)
        selection = meta(self.experts, dtype=torch.float32)
        if self.hashed:
            selection = meta(1000, self.per_token, dtype=torch.int64)
        return Router(gate, selection, self.hashed, self.per_token, 1.5)

    def weights(self) -> tuple[ExpertWeights[PackedWeight], ExpertWeights[PackedWeight]]:
        """The routed experts and the shared one."""
        routed, shared = self.formats
        shapes = ((self.inner, self.width), (self.width, self.inner), (self.inner, self.width))
        experts = ExpertWeights(*(weight(routed, self.experts, *shape) for shape in shapes))
        return experts, ExpertWeights(*(weight(shared, *shape) for shape in shapes))


FLASH = Geometry(4096, 2048, 256)
PRO = Geometry(7168, 3072, 384)
GEOMETRIES = {
    "flash": FLASH,
    "pro": PRO,
    "flash, hashed, mxfp4": Geometry(4096, 2048, 256, formats=(MXFP4, FP8), hashed=True),
    "tiny": Geometry(128, 64, 8, 2),
    "odd experts, bf16": Geometry(320, 160, 5, 3, (BF16, BF16)),
    "ragged": Geometry(352, 160, 37, 6, (MXFP4, NVFP4), hashed=True),
}


def weight(format: QuantFormat, *shape: int) -> PackedWeight:
    """A packed weight, or a stack of them."""
    *stack, rows, columns = shape
    tiles = padded(rows) // TILE_ROWS
    chunks = padded(columns) // chunk_columns(format)
    block_scale = None
    global_scale = None
    if format is FP8:
        sizes = packed_shapes(format, shape)["block_scale"] or ()
        block_scale = meta(*sizes, dtype=torch.float32)
    elif format is not BF16:
        bytes_per_row = 8 if format is NVFP4 else 4
        sizes = (*stack, tiles, padded(columns) // PADDING, 8, bytes_per_row)
        block_scale = meta(*sizes, dtype=torch.uint8)
    if format is NVFP4:
        global_scale = meta(*stack, dtype=torch.float32)
    data = meta(*stack, tiles, chunks, LANES, LANE_BYTES, dtype=torch.uint8)
    return PackedWeight(data, block_scale, global_scale, format, shape)


def step(recording: Recording, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """x and token ids."""
    tokens = recording.tokens
    return (
        recording.empty((tokens, geometry.width), torch.bfloat16),
        recording.empty((tokens,), torch.int64),
    )


def launches(recording: Recording) -> list[Launch]:
    """The items of a recording in which nothing is torch's."""
    assert all(isinstance(item, Launch) for item in recording.items)
    return [item for item in recording.items if isinstance(item, Launch)]


def names(recording: Recording) -> list[str]:
    """The kernels in their order."""
    return [launch.signature.kernel for launch in launches(recording)]


def bytes_of(launch: Launch, argument: str) -> int:
    """Of the memory of a tensor argument."""
    tensor = launch.arguments[argument]
    assert isinstance(tensor, Tensor)
    return tensor.nbytes


def recorded(form: ModuleType, geometry: Geometry, target: Target, tokens: int) -> Recording:
    """A layer of steps of so many tokens by ``moe`` of ``dsv4.ops.moe.decode`` or ``prefill``."""
    recording = Recording(target, tokens)
    inputs = step(recording, geometry)
    y_TE, _, _ = form.moe(recording, *inputs, geometry.router(), *geometry.weights(), LIMIT)
    assert (tuple(y_TE.shape), y_TE.dtype) == ((tokens, geometry.width), torch.bfloat16)
    return recording
