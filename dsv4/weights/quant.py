"""QuantFormat and QuantTensor: the only place that knows how weights are packed and scaled.

``QuantTensor.dequantize()`` is the meaning of the bytes (model.md#weight-formats); every kernel is
tested against it.
"""

import enum
import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP8_BLOCK = 128
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours; a tie goes to the even code (model.md#codes-and-scales), so every
# second comparison includes equality.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class QuantFormat(enum.Enum):
    """Storage format of a weight matrix ``[N, K]`` (leading dimensions stack several matrices).

    ========== ============================ ===================================== ===================
    format     data                         block_scale                           global_scale
    ========== ============================ ===================================== ===================
    NVFP4      uint8 [N, K/2] (two E2M1)    float8_e4m3fn [N, K/16]               float32 [] per matrix
    MXFP4      uint8 [N, K/2] (two E2M1)    float8_e8m0fnu [N, K/32]              none
    FP8        float8_e4m3fn [N, K]         float8_e8m0fnu or float32, 128 × 128  none
    BF16, F32  that dtype [N, K]            none                                  none
    ========== ============================ ===================================== ===================
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


_DATA_DTYPE = {
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
class QuantTensor:
    """A weight as stored: codes plus scales. ``shape`` is the logical shape ``[..., N, K]``; scales
    are multipliers.

    Raises ``ValueError`` when a dtype or shape contradicts ``format`` and ``shape``.
    """

    data: Tensor
    block_scale: Tensor | None
    global_scale: Tensor | None
    format: QuantFormat
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = packed_shapes(self.format, self.shape)
        scale_dtypes = _SCALE_DTYPES.get(self.format, ())
        _check_part("data", self.data, expected["data"], (_DATA_DTYPE[self.format],))
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

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(
            part.nbytes
            for part in (self.data, self.block_scale, self.global_scale)
            if part is not None
        )

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __getitem__(self, index: int) -> "QuantTensor":
        """One matrix of a stack along the first dimension, without a copy."""
        if len(self.shape) < 3:
            raise ValueError(f"QuantTensor of shape {self.shape} is one matrix, not a stack")
        scales = [
            None if part is None else part[index] for part in (self.block_scale, self.global_scale)
        ]
        return QuantTensor(self.data[index], scales[0], scales[1], self.format, self.shape[1:])

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
            return self.data.float() * _expand_blocks(scale, self.shape)
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
                f"shape: found K = {columns}, expected a multiple of {format.group_size} for {format.value}"
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
    dtypes = {
        "data": _DATA_DTYPE[format],
        "block_scale": _SCALE_DTYPES.get(format, (torch.uint8,))[0],
        "global_scale": torch.float32,
    }
    parts = {
        name: None if part is None else torch.empty(part, dtype=dtypes[name], device="meta")
        for name, part in packed_shapes(format, shape).items()
    }
    return QuantTensor(parts["data"], parts["block_scale"], parts["global_scale"], format, shape)  # pyright: ignore[reportArgumentType]


def packed_bytes(format: QuantFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a stored matrix: codes and scales, with 1-byte block scales."""
    sizes = {
        name: math.prod(part)
        for name, part in packed_shapes(format, shape).items()
        if part is not None
    }
    sizes["data"] *= _DATA_DTYPE[format].itemsize
    if "global_scale" in sizes:
        sizes["global_scale"] *= 4
    return sum(sizes.values())


def _check_part(
    name: str, part: Tensor | None, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if (part is None) != (shape is None):
        raise ValueError(f"{name}: {'missing' if part is None else 'not part of this format'}")
    if part is not None and (tuple(part.shape) != shape or part.dtype not in dtypes):
        raise ValueError(
            f"{name}: found {part.dtype} {tuple(part.shape)}, expected {dtypes[0]} {shape}"
        )


def _expand_blocks(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows = scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(FP8_BLOCK, dim=-1)[..., : shape[-1]]


def e8m0_to_float(scale: Tensor) -> Tensor:
    """E8M0 bytes (``float8_e8m0fnu``) to float32 2^(b − 127); byte 255 is NaN. The bytes are
    viewed, never converted.
    """
    code = scale.view(torch.uint8).to(torch.int32)
    # Code 0 is 2^-127, a float32 subnormal, which the exponent field alone cannot express.
    bits = torch.where(code == 0, 1 << 22, code << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 ``[..., K/2]`` to float32 ``[..., K]``: element 2k in the low nibble, 2k + 1 in the
    high nibble.
    """
    table = torch.tensor(
        _E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES), device=packed.device
    )
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return table[codes.to(torch.int32)]


def pack_e2m1(values: Tensor) -> Tensor:
    """Rounds float ``[..., K]`` (K even) to E2M1, ties to even, saturating at ±6, into uint8
    ``[..., K/2]``.
    """
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        code += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    code |= torch.signbit(values).to(torch.uint8) << 3
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def ceil_power_of_two_exponent(values: Tensor) -> Tensor:
    """int32 exponent e of the smallest power of two 2^e ≥ value, from the float32 bits (positive
    normal values).
    """
    bits = values.float().view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def exponent_to_e8m0(exponent: Tensor) -> Tensor:
    """int32 exponents to E8M0 bytes, clamped to the representable [−127, 127]."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize(
    weight: Tensor, format: QuantFormat, global_scale: Tensor | None = None
) -> QuantTensor:
    """Quantises float ``[..., N, K]`` to ``format``; round to nearest even everywhere.

    NVFP4 takes an optional ``global_scale`` (float32, stack shape) so that w1 and w3 of an expert
    can share one (model.md#nvfp4). Raises ``ValueError`` for values that are not finite.
    """
    weight = weight.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: found NaN or infinity, expected finite values")
    if format is QuantFormat.NVFP4:
        return _quantize_nvfp4(
            weight, nvfp4_global_scale(weight) if global_scale is None else global_scale
        )
    if format is QuantFormat.MXFP4:
        return _quantize_mxfp4(weight)
    if format is QuantFormat.FP8_BLOCK128:
        return _quantize_fp8_block(weight)
    return QuantTensor.dense(weight.to(_DATA_DTYPE[format]))


def nvfp4_global_scale(weight: Tensor) -> Tensor:
    """float32 per-matrix scale amax / (6 · 448) of float ``[..., N, K]``; 1 for an all-zero matrix."""
    amax = weight.float().abs().amax(dim=(-2, -1))
    return torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))


def _quantize_nvfp4(weight: Tensor, global_scale: Tensor) -> QuantTensor:
    groups = weight.unflatten(-1, (-1, 16))
    total = global_scale[..., None, None]
    block_scale = (
        (groups.abs().amax(-1) / (E2M1_MAX * total)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    )
    divisor = (block_scale.float() * total).unsqueeze(-1)
    scaled = torch.where(divisor > 0, groups / divisor, torch.zeros_like(groups))
    return QuantTensor(
        pack_e2m1(scaled.flatten(-2)),
        block_scale,
        global_scale,
        QuantFormat.NVFP4,
        tuple(weight.shape),
    )


def _quantize_mxfp4(weight: Tensor) -> QuantTensor:
    groups = weight.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1).clamp(min=E2M1_MAX * 2.0**-126)
    block_scale = exponent_to_e8m0(ceil_power_of_two_exponent(amax * (1 / E2M1_MAX)))
    scaled = groups / e8m0_to_float(block_scale).unsqueeze(-1)
    return QuantTensor(
        pack_e2m1(scaled.flatten(-2)), block_scale, None, QuantFormat.MXFP4, tuple(weight.shape)
    )


def _quantize_fp8_block(weight: Tensor) -> QuantTensor:
    *stack, rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-2, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    amax = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-4)
    block_scale = exponent_to_e8m0(ceil_power_of_two_exponent(amax * (1 / E4M3_MAX)))
    scaled = weight / _expand_blocks(e8m0_to_float(block_scale), tuple(weight.shape))
    data = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return QuantTensor(data, block_scale, None, QuantFormat.FP8_BLOCK128, tuple(weight.shape))


def swizzle_block_scale(scale: Tensor) -> Tensor:
    """Block scales ``[R, S]`` (1 byte each) to the 128 × 4 layout of Blackwell tensor cores, zero
    padded.

    model.md#scale-swizzle. Returns uint8 ``[⌈R/128⌉ · ⌈S/4⌉ · 512]`` with scale (r, s) at
    ``((r/128)·⌈S/4⌉ + s/4)·512 + (r%32)·16 + ((r%128)/32)·4 + s%4`` (integer divisions).
    """
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    return (
        padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(-1)
    )


def unswizzle_block_scale(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of ``swizzle_block_scale``: uint8 ``[rows, columns]``."""
    row_atoms = math.ceil(rows / 128)
    column_atoms = math.ceil(columns / 4)
    atoms = swizzled.view(row_atoms, column_atoms, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return atoms.reshape(row_atoms * 128, column_atoms * 4)[:rows, :columns].contiguous()
