"""Weights, activations and targets without memory, for recordings that nothing runs."""

import torch
from torch import Tensor

from dsv4.launch.items import Item, Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
DEVICE = torch.device("cuda", 0)
# Per thread, at the launch of a prefill GEMM of so many. Its warpgroups share them out again by
# setmaxnreg: with one less, the last of them would wait forever.
PREFILL_REGISTERS = {384: 168, 512: 128}
TARGETS = [Target(DEVICE, "sm_90a", 132), Target(DEVICE, "sm_100a", 148)]
_DATA = {NVFP4: torch.uint8, MXFP4: torch.uint8, FP8: torch.float8_e4m3fn, BF16: torch.bfloat16}
_SCALE = {NVFP4: torch.float8_e4m3fn, MXFP4: torch.float8_e8m0fnu, FP8: torch.float8_e8m0fnu}


def stored(format: QuantFormat, *shape: int) -> QuantTensor:
    """A weight as stored."""
    shapes = packed_shapes(format, shape)
    data = empty(_DATA[format], *(shapes["data"] or ()))
    block_shape = shapes["block_scale"]
    total_shape = shapes["global_scale"]
    block_scale = None if block_shape is None else empty(_SCALE[format], *block_shape)
    global_scale = None if total_shape is None else empty(torch.float32, *total_shape)
    return QuantTensor(data, block_scale, global_scale, format, shape)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def activations(recording: Recording, *sizes: int) -> Tensor:
    """bfloat16 ``[T, *sizes]`` for the tokens of a recording."""
    return recording.empty((recording.tokens, *sizes), torch.bfloat16)


def shapes(recording: Recording, tokens: int) -> list[Shape]:
    """What is launched for a number of tokens, in order."""
    found = [_shape(item, tokens) for item in recording.items]
    return [shape for shape in found if shape is not None]


def names(recording: Recording) -> list[str]:
    """Kernels in their order; "call" for functions of torch."""
    return [
        item.signature.kernel if isinstance(item, Launch) else "call" for item in recording.items
    ]


def _shape(item: Item, tokens: int) -> Shape | None:
    if not isinstance(item, Launch):
        return None
    return item.shape if item.shape_of is None else item.shape_of(tokens)
