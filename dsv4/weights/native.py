"""NativeWeight: a second copy of a weight, in the bytes that Blackwell's block-scaled tensor cores
read.

Codes lie K-major as in the checkpoint, scales in the 128 × 4 order (model.md#scale-swizzle), one
for every ``NATIVE_GROUP`` columns of every row. A copy holds exactly the values of its weight:

* FP8: a 128 × 128 scale that is a power of two becomes equal E8M0 scales of 32 columns.
* MXFP4, and NVFP4 as NVFP4: the stored codes and scales.
* NVFP4 as MXFP4: the E4M3 scales must be powers of two in equal pairs, which is what a lossless
  cast from MXFP4 leaves. The global scale is kept. Codes under a scale of zero become zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.weights.codes import e8m0_to_float, unpack_e2m1
from dsv4.weights.quant import FP8_BLOCK, QuantFormat, QuantTensor, WeightParts
from dsv4.weights.scale_swizzle import swizzle_block_scale, unswizzle_block_scale

# Columns that share a scale.
NATIVE_GROUP = {QuantFormat.FP8_BLOCK128: 32, QuantFormat.MXFP4: 32, QuantFormat.NVFP4: 16}
# What K is a multiple of: whole groups, rows of 16 bytes, and for 4-bit codes that a copy spreads
# over bytes (MXFP4) its blocks of 128.
_COLUMN_MULTIPLE = {QuantFormat.FP8_BLOCK128: 32, QuantFormat.MXFP4: 128, QuantFormat.NVFP4: 32}
# Rows of w1, then as many of w3: half a tile of the gate/up product each.
INTERLEAVED_ROWS = 128
_ATOM_BYTES = 512


@dataclass(frozen=True)
class NativeWeight(WeightParts):
    """A weight ``[..., N, K]`` for block-scaled products.

    ``data`` uint8: ``[..., N, K]`` E4M3 (FP8), ``[..., N, K/2]`` E2M1 pairs (MXFP4, NVFP4).
    ``block_scale`` uint8 ``[..., ⌈N/128⌉ · ⌈S/4⌉ · 512]``: swizzled E8M0 (NVFP4: E4M3) scales,
    zeros behind the last row and the last of S = K / ``NATIVE_GROUP`` columns. ``global_scale``
    float32 ``[...]`` multiplies the product; 1 where the format has none.
    """

    block_scale: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    global_scale: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        *stack, rows, _ = self.shape
        _check_parts(self, tuple(stack), rows, tuple(stack))

    def dequantize(self) -> Tensor:
        """The values as float32 ``[..., N, K]``, bitwise those of the stored weight, but for the
        sign of a zero whose block scale is zero.
        """
        scale = self._row_scale()
        if self.format is QuantFormat.NVFP4:
            factor = scale.view(torch.float8_e4m3fn).float()
        else:
            factor = e8m0_to_float(scale)
        if self.format is QuantFormat.FP8_BLOCK128:
            codes = self.data.view(torch.float8_e4m3fn).float()
        else:
            codes = unpack_e2m1(self.data)
        values = codes.unflatten(-1, (-1, NATIVE_GROUP[self.format])) * factor.unsqueeze(-1)
        return (values * self.global_scale[..., None, None, None]).flatten(-2)

    def stored(self) -> QuantTensor:
        """A weight with these values in a format of checkpoints, whose native copy this is.

        MXFP4 with a global scale other than 1 becomes NVFP4.
        """
        scale = self._row_scale()
        if self.format is QuantFormat.FP8_BLOCK128:
            codes = self.data.view(torch.float8_e4m3fn)
            blocks = scale[..., ::FP8_BLOCK, :: FP8_BLOCK // 32].contiguous()
            block_scale = blocks.view(torch.float8_e8m0fnu)
            return QuantTensor(codes, block_scale, None, self.format, self.shape)
        if self.format is QuantFormat.NVFP4:
            block_scale = scale.view(torch.float8_e4m3fn)
            return QuantTensor(self.data, block_scale, self.global_scale, self.format, self.shape)
        if bool((self.global_scale == 1).all()):
            block_scale = scale.view(torch.float8_e8m0fnu)
            return QuantTensor(self.data, block_scale, None, self.format, self.shape)
        block_scale = e8m0_to_float(scale.repeat_interleave(2, -1)).to(torch.float8_e4m3fn)
        return QuantTensor(self.data, block_scale, self.global_scale, QuantFormat.NVFP4, self.shape)

    def _row_scale(self) -> Tensor:
        """The scales in their plain order: uint8 ``[..., N, S]``."""
        *_, rows, columns = self.shape
        groups = columns // NATIVE_GROUP[self.format]
        return unswizzle_block_scale(self.block_scale, rows, groups)


@dataclass(frozen=True)
class NativeGateUp(WeightParts):
    """w1 and w3 ``[..., F, K]`` of experts in one copy: 128 rows of w1, 128 of w3, and so on.

    The parts are those of a ``NativeWeight`` ``[..., 2 · F, K]``, but for ``global_scale`` float32
    ``[..., 2]``: that of w1 and that of w3. ``shape`` is ``[..., F, K]``; F is a multiple of 128.
    """

    block_scale: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    global_scale: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        *stack, rows, _ = self.shape
        _check_parts(self, tuple(stack), 2 * rows, (*stack, 2))

    @classmethod
    def of(cls, w1: NativeWeight, w3: NativeWeight) -> "NativeGateUp":
        """The copy made of those of w1 and w3. Raises ``ValueError`` when they do not match."""
        if w1.shape != w3.shape or w1.format is not w3.format:
            found = f"{w3.format.value} {w3.shape}"
            raise ValueError(f"w3: found {found}, expected {w1.format.value} {w1.shape} as w1")
        if w1.shape[-2] % INTERLEAVED_ROWS:
            expected = f"a multiple of {INTERLEAVED_ROWS}"
            raise ValueError(f"w1: found {w1.shape[-2]} rows, expected {expected}")
        data = _interleaved(w1.data, w3.data, INTERLEAVED_ROWS)
        atoms = w1.shape[-2] // INTERLEAVED_ROWS
        block_scale = _interleaved(
            w1.block_scale.unflatten(-1, (atoms, -1)), w3.block_scale.unflatten(-1, (atoms, -1)), 1
        )
        total = torch.stack((w1.global_scale, w3.global_scale), -1)
        return cls(data, block_scale.flatten(-2), total, w1.format, w1.shape)

    def split(self) -> tuple[NativeWeight, NativeWeight]:
        """The copies of w1 and w3 again."""
        atoms = self.shape[-2] // INTERLEAVED_ROWS
        data = self.data.unflatten(-2, (atoms, 2, INTERLEAVED_ROWS))
        scale = self.block_scale.unflatten(-1, (atoms, 2, -1))
        w1, w3 = (
            NativeWeight(
                data[..., part, :, :].flatten(-3, -2),
                scale[..., part, :].flatten(-2),
                self.global_scale[..., part],
                self.format,
                self.shape,
            )
            for part in range(2)
        )
        return w1, w3


def unsupported_reason(weight: QuantTensor, format: QuantFormat) -> str | None:
    """Why ``weight`` has no native copy in ``format``, for a report; None when it has one.

    What depends on values is not looked at on the meta device.
    """
    found = weight.format
    disguise = found is QuantFormat.NVFP4 and format is QuantFormat.MXFP4
    if format not in NATIVE_GROUP or not (disguise or found is format):
        return f"{found.value} weights have no native form as {format.value}"
    if weight.shape[-1] % _COLUMN_MULTIPLE[format]:
        multiple = _COLUMN_MULTIPLE[format]
        return f"K = {weight.shape[-1]} is no multiple of {multiple}, as {format.value} needs"
    if weight.data.is_meta:
        return None
    if disguise and not is_disguised_mxfp4(weight):
        return "NVFP4 scales are not powers of two in equal pairs"
    if format is QuantFormat.FP8_BLOCK128:
        assert weight.block_scale is not None
        if _exact_e8m0(weight.block_scale) is None:
            return "FP8 block scales are not all powers of two from 2^-127 to 2^127"
    return None


def is_disguised_mxfp4(weight: QuantTensor) -> bool:
    """Whether an NVFP4 weight has only block scales that are powers of two (or zero) in equal
    pairs: E8M0 scales of 32 columns, written as E4M3 ones of 16.
    """
    if weight.format is not QuantFormat.NVFP4 or weight.shape[-1] % 32:
        return False
    assert weight.block_scale is not None
    return all(_is_disguised(scale) for scale in _matrices(weight.block_scale))


def native_weight(weight: QuantTensor, format: QuantFormat) -> NativeWeight:
    """The native copy of ``weight`` ``[..., N, K]`` in ``format``, on the device it lies on.

    On the meta device only the shapes are made. Raises ``ValueError`` with ``unsupported_reason``.
    """
    reason = unsupported_reason(weight, format)
    if reason is not None:
        raise ValueError(f"weight: {reason}")
    *stack, rows, _ = weight.shape
    total = weight.global_scale
    if total is None:
        total = torch.ones(stack, dtype=torch.float32, device=weight.device)
    data = weight.data.view(torch.uint8)
    if data.is_meta:
        scale_bytes = math.prod(_scale_shape(format, rows, weight.shape[-1]))
        swizzled = torch.empty((*stack, scale_bytes), dtype=torch.uint8, device="meta")
        return NativeWeight(data, swizzled, total, format, weight.shape)
    if format is QuantFormat.MXFP4 and weight.format is QuantFormat.NVFP4:
        data, scale = _undisguised(weight)
    else:
        scale = _row_scales(weight)
    return NativeWeight(data, swizzle_block_scale(scale), total, format, weight.shape)


def native_bytes(format: QuantFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a native copy in ``format`` of a weight ``[..., N, K]``."""
    *stack, rows, columns = shape
    codes = rows * columns * (8 if format is QuantFormat.FP8_BLOCK128 else 4) // 8
    return math.prod(stack) * (codes + math.prod(_scale_shape(format, rows, columns)) + 4)


def _scale_shape(format: QuantFormat, rows: int, columns: int) -> tuple[int, int, int]:
    groups = columns // NATIVE_GROUP[format]
    return ceil_div(rows, 128), ceil_div(groups, 4), _ATOM_BYTES


def _check_parts(
    weight: WeightParts, stack: tuple[int, ...], rows: int, total: tuple[int, ...]
) -> None:
    format = weight.format
    columns = weight.shape[-1]
    if format not in NATIVE_GROUP:
        expected = [known.value for known in NATIVE_GROUP]
        raise ValueError(f"format: found {format.value}, expected one of {expected}")
    width = columns if format is QuantFormat.FP8_BLOCK128 else columns // 2
    scale_bytes = math.prod(_scale_shape(format, rows, columns))
    for name, shape, dtype in (
        ("data", (*stack, rows, width), torch.uint8),
        ("block_scale", (*stack, scale_bytes), torch.uint8),
        ("global_scale", total, torch.float32),
    ):
        part = getattr(weight, name)
        if tuple(part.shape) != shape or part.dtype != dtype:
            found = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"{name}: found {found}, expected {dtype} {shape}")


def _row_scales(weight: QuantTensor) -> Tensor:
    """One scale for every group of every row: uint8 ``[..., N, S]``."""
    assert weight.block_scale is not None
    if weight.format is not QuantFormat.FP8_BLOCK128:
        return weight.block_scale.view(torch.uint8)
    blocks = _exact_e8m0(weight.block_scale)
    assert blocks is not None
    *_, rows, columns = weight.shape
    of_rows = blocks.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return of_rows.repeat_interleave(FP8_BLOCK // 32, -1)[..., : columns // 32]


def _undisguised(weight: QuantTensor) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 scales of an NVFP4 weight that is MXFP4 in disguise, made one matrix of a
    stack at a time.
    """
    assert weight.block_scale is not None
    groups = weight.shape[-1] // 32
    data = torch.empty_like(weight.data)
    scale = data.new_empty((*weight.shape[:-1], groups))
    parts = (weight.data, weight.block_scale, data, scale)
    for stored, pairs, codes, exponents in zip(*map(_matrices, parts), strict=True):
        of_group = pairs.float()[:, ::2]
        exact = _exact_e8m0(_without_zeros(of_group))
        assert exact is not None
        is_zero = of_group == 0
        exponents.copy_(exact.masked_fill(is_zero, 0))
        # 2^-127 would give codes that are not zero a value.
        lost = is_zero.repeat_interleave(16, -1)
        codes.copy_(stored.masked_fill(lost, 0))
    return data, scale


def _is_disguised(scale: Tensor) -> bool:
    pairs = scale.view(torch.uint8).unflatten(-1, (-1, 2))
    if not torch.equal(pairs[..., 0], pairs[..., 1]):
        return False
    return _exact_e8m0(_without_zeros(scale.float())) is not None


def _without_zeros(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _matrices(part: Tensor) -> Tensor:
    return part.view(-1, *part.shape[-2:])


def _exact_e8m0(scale: Tensor) -> Tensor | None:
    """The E8M0 codes of scales, uint8; None unless all are powers of two from 2^-127 to 2^127.
    E8M0 scales are taken as they are, their NaN included.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    bits = scale.contiguous().view(torch.int32)
    exponent = bits >> 23
    is_smallest = bits == 1 << 22
    is_power = (bits & 0x7FFFFF == 0) & (exponent >= 1) & (exponent <= 254)
    if not bool((is_power | is_smallest).all()):
        return None
    return exponent.to(torch.uint8)


def _interleaved(first: Tensor, second: Tensor, rows: int) -> Tensor:
    """``rows`` rows of ``first`` ``[..., R, C]``, as many of ``second``, and so on."""
    parts = [part.unflatten(-2, (-1, rows)) for part in (first, second)]
    return torch.stack(parts, -3).flatten(-4, -2)
