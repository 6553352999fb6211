"""QuantFormat and QuantTensor: how weights are packed and scaled, and nothing else knows it.

``QuantTensor.dequantize()`` is the meaning of the bytes (model.md#weight-formats); every kernel is
tested against it.
"""

import enum
import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from dsv4.errors import UserError
from dsv4.weights.codes import e8m0_to_float, unpack_e2m1

FP8_BLOCK = 128


class ValuesLost(UserError):
    """A weight of a checkpoint whose values another layout cannot hold."""


class QuantFormat(enum.Enum):
    """Storage format of a weight matrix ``[N, K]`` (leading dimensions stack several matrices).

    ========== ========================== ====================================== =================
    format     data                       block_scale                            global_scale
    ========== ========================== ====================================== =================
    NVFP4      uint8 [N, K/2] (two E2M1)  float8_e4m3fn [N, K/16]                float32 [], one
                                                                                 per matrix
    MXFP4      uint8 [N, K/2] (two E2M1)  float8_e8m0fnu [N, K/32]               none
    FP8        float8_e4m3fn [N, K]       float8_e8m0fnu or float32, 128 × 128   none
    BF16, F32  that dtype [N, K]          none                                   none
    ========== ========================== ====================================== =================
    """

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    FP8_BLOCK128 = "fp8_block128"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def group_size(self) -> int | None:
        """Elements along K that share one block scale of a 4-bit format, else None."""
        return {QuantFormat.NVFP4: 16, QuantFormat.MXFP4: 32}.get(self)


DATA_DTYPE = {
    QuantFormat.NVFP4: torch.uint8,
    QuantFormat.MXFP4: torch.uint8,
    QuantFormat.FP8_BLOCK128: torch.float8_e4m3fn,
    QuantFormat.BF16: torch.bfloat16,
    QuantFormat.F32: torch.float32,
}
_SCALE_DTYPES = {
    QuantFormat.NVFP4: (torch.float8_e4m3fn,),
    QuantFormat.MXFP4: (torch.float8_e8m0fnu,),
    QuantFormat.FP8_BLOCK128: (torch.float8_e8m0fnu, torch.float32),
}


class Weight(Protocol):
    """A weight matrix ``[..., N, K]`` in any layout: as stored (``QuantTensor``) or as an op table
    packs it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape; leading dimensions stack several matrices."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        ...

    def __getitem__(self, index: int) -> Self:
        """One matrix of a stack."""
        ...

    def dequantize(self) -> Tensor:
        """The values as float32 ``[..., N, K]``."""
        ...


@dataclass(frozen=True)
class WeightParts:
    """What a weight consists of in every layout: codes, scales, and the logical shape ``[..., N,
    K]`` of the matrix or stack of matrices.
    """

    data: Tensor
    block_scale: Tensor | None
    global_scale: Tensor | None
    format: QuantFormat
    shape: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together, padding included."""
        parts = (self.data, self.block_scale, self.global_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def __getitem__(self, index: int) -> Self:
        """One matrix of a stack along the first dimension, without a copy."""
        if len(self.shape) < 3:
            name = type(self).__name__
            raise ValueError(f"{name} of shape {self.shape} is one matrix, not a stack")
        block, total = (
            None if part is None else part[index] for part in (self.block_scale, self.global_scale)
        )
        return type(self)(self.data[index], block, total, self.format, self.shape[1:])


@dataclass(frozen=True)
class QuantTensor(WeightParts):
    """A weight as stored: codes plus scales. ``shape`` is the logical shape ``[..., N, K]``; scales
    are multipliers.

    Raises ``ValueError`` when a dtype or shape contradicts ``format`` and ``shape``.
    """

    def __post_init__(self) -> None:
        expected = packed_shapes(self.format, self.shape)
        scale_dtypes = _SCALE_DTYPES.get(self.format, ())
        _check_part("data", self.data, expected["data"], (DATA_DTYPE[self.format],))
        _check_part("block_scale", self.block_scale, expected["block_scale"], scale_dtypes)
        _check_part("global_scale", self.global_scale, expected["global_scale"], (torch.float32,))

    @classmethod
    def dense(cls, weight: Tensor) -> "QuantTensor":
        """Wraps a bfloat16 or float32 matrix ``[..., N, K]`` as it is."""
        formats = {torch.bfloat16: QuantFormat.BF16, torch.float32: QuantFormat.F32}
        if weight.dtype not in formats:
            raise ValueError(
                f"weight: found {weight.dtype}, expected torch.bfloat16 or torch.float32"
            )
        return cls(weight, None, None, formats[weight.dtype], tuple(weight.shape))

    def to(self, device: torch.device | str) -> "QuantTensor":
        """The same bytes on another device."""
        block, total = (
            None if part is None else part.to(device)
            for part in (self.block_scale, self.global_scale)
        )
        return QuantTensor(self.data.to(device), block, total, self.format, self.shape)

    def dequantize(self) -> Tensor:
        """The values as float32 ``[..., N, K]``.

        Exact for FP8, MXFP4, BF16 and F32. NVFP4 is (E2M1 · E4M3), exact, times the float32 global
        scale, rounded once. An E8M0 scale of 255 and an E4M3 NaN code give NaN.
        """
        if self.format in (QuantFormat.BF16, QuantFormat.F32):
            return self.data.float()
        assert self.block_scale is not None
        scale = (
            e8m0_to_float(self.block_scale)
            if self.block_scale.dtype == torch.float8_e8m0fnu
            else self.block_scale.float()
        )
        if self.format is QuantFormat.FP8_BLOCK128:
            return self.data.float() * expand_blocks(scale, self.shape)
        values = unpack_e2m1(self.data).unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
        if self.global_scale is not None:
            values = values * self.global_scale[..., None, None, None]
        return values.flatten(-2)


def packed_shapes(format: QuantFormat, shape: tuple[int, ...]) -> dict[str, tuple[int, ...] | None]:
    """Shapes of ``data``, ``block_scale`` and ``global_scale`` (None: absent) for a logical shape
    ``[..., N, K]``.

    Raises ``ValueError`` when K is not a multiple of the group size of a 4-bit format.
    """
    if len(shape) < 2:
        raise ValueError(f"shape: found {shape}, expected at least two dimensions")
    *stack, rows, columns = shape
    if format.group_size is not None:
        if columns % format.group_size:
            raise ValueError(
                f"shape: found K = {columns}, "
                f"expected a multiple of {format.group_size} for {format.value}"
            )
        total = tuple(stack) if format is QuantFormat.NVFP4 else None
        blocks = (*stack, rows, columns // format.group_size)
        return {"data": (*stack, rows, columns // 2), "block_scale": blocks, "global_scale": total}
    blocks = None
    if format is QuantFormat.FP8_BLOCK128:
        blocks = (*stack, math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK))
    return {"data": shape, "block_scale": blocks, "global_scale": None}


def planned_quant_tensor(format: QuantFormat, shape: tuple[int, ...]) -> QuantTensor:
    """A weight without values, on torch's meta device: for plans that need shapes only."""
    data, block, total = (
        None if part is None else torch.empty(part, dtype=_part_dtype(format, name), device="meta")
        for name, part in packed_shapes(format, shape).items()
    )
    assert data is not None
    return QuantTensor(data, block, total, format, shape)


def packed_bytes(format: QuantFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a stored matrix: codes and scales, with 1-byte block scales."""
    return sum(
        math.prod(part) * _part_dtype(format, name).itemsize
        for name, part in packed_shapes(format, shape).items()
        if part is not None
    )


def _part_dtype(format: QuantFormat, name: str) -> torch.dtype:
    """That of a part which the format has; of several that of 1 byte."""
    if name == "data":
        return DATA_DTYPE[format]
    return torch.float32 if name == "global_scale" else _SCALE_DTYPES[format][0]


def _check_part(
    name: str, part: Tensor | None, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if (part is None) != (shape is None):
        raise ValueError(f"{name}: {'missing' if part is None else 'not part of this format'}")
    if part is not None and (tuple(part.shape) != shape or part.dtype not in dtypes):
        raise ValueError(
            f"{name}: found {part.dtype} {tuple(part.shape)}, expected {dtypes[0]} {shape}"
        )


def expand_blocks(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One scale per element of ``shape`` from one scale per block of 128 × 128 elements."""
    rows = scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(FP8_BLOCK, dim=-1)[..., : shape[-1]]
