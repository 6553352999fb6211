"""The arithmetic of tensor cores in numpy, bit for bit as published (arXiv 2511.10909).

The published model was measured on the machines. One step adds the products of K columns to a
float32 accumulator:

| instruction | K per step | one term | F |
|---|---|---|---|
| wgmma and mma.sync of Hopper, tcgen05 kind::f16 | 16 | one product | 25 |
| tcgen05 kind::mxf8f6f4 | 32 | one product | 25 |
| tcgen05 kind::mxf4, kind::mxf4nvf4 | 64 | the exact sum of 16 products | 35 |

A term has a significand and an exponent. The exponent is the sum of those of its factors: operands
and scales in the first two rows, the two scales alone in the last. The exponent of a subnormal is
that of its format's smallest normal number, the exponent of a zero is -126 in every format. The old
accumulator is a term too. Every term is cut towards zero to F binary places below the *largest
exponent* of the step, which may be that of a zero. The sum of what is left is exact; it is cut
towards zero to float32, subnormals included. A zero is positive, from 2^128 on the result is
infinite. NaN and infinities follow the sum in IEEE arithmetic; every NaN is 0x7fffffff.

Two cases the authors' program does not run, both chosen here: an E2M1 operand of mxf8f6f4 counts as
the E4M3 number of its value, and an infinite accumulator of mxf4 stays what the IEEE sum makes
of it. Sums that are exact, those of integer problems, depend on none of this.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.ptx.floats import bf16_values

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
ScaleFormat = Literal["ue8m0", "ue4m3"]

_ZERO = -126  # the exponent of a zero
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


class Factor(NamedTuple):
    """Of a step's products: float64 values ``[R, K]``, and the exponents ``[R, G]`` that this
    factor gives to the step's G terms, each of K / G consecutive columns.
    """

    values: Float64
    exponents: NDArray[np.int16]


class _Kind(NamedTuple):
    columns: int  # K of a step
    together: int  # products of a term
    bits: int  # F


_F16 = _Kind(16, 1, 25)
_BLOCK_SCALED = {
    "mxf8f6f4": _Kind(32, 1, 25),
    "mxf4": _Kind(64, 16, 35),
    "mxf4nvf4": _Kind(64, 16, 35),
}


# Sums of one warp: looking whether they are exact takes longer than cutting every term.
_FEW = 16 * 8


def _e4m3_values() -> Float32:
    code = np.arange(256)
    exponent = code >> 3 & 15
    mantissa = code & 7
    size = np.where(exponent == 0, mantissa / 512, np.ldexp(8 + mantissa, exponent - 10))
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size)).astype(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The float32 value of each of the 16 codes."""
E4M3 = _e4m3_values()
"""The float32 value of each of the 256 codes; 0x7f and 0xff are NaN."""
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
"""The float32 value of each of the 256 codes; 0xff is NaN."""


def e2m1_values(packed: NDArray[np.uint8]) -> Float32:
    """``[..., K / 2]`` bytes of two codes, the lower nibble first, as float32 ``[..., K]``."""
    codes = np.stack((packed & 15, packed >> 4), -1)
    return E2M1[codes.reshape(*packed.shape[:-1], -1)]


def mma_16_bit(c: ArrayLike, a: Factor, b: Factor) -> Float32:
    """``c + a bᵀ`` as wgmma (Hopper) and tcgen05 kind::f16 (Blackwell) add products of ``F16`` or
    ``BF16`` numbers.

    c float32 ``[M, N]``; a ``[M, K]`` and b ``[N, K]``, K a multiple of 16: one step per 16
    columns, in their order. Returns float32 ``[M, N]``.
    """
    return _steps(c, a, b, _F16)


def block_scaled_mma(
    c: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    scale_a: NDArray[np.uint8],
    scale_b: NDArray[np.uint8],
    kind: str,
    scale_format: ScaleFormat = "ue8m0",
) -> Float32:
    """``c + (a * scale_a) (b * scale_b)ᵀ`` as tcgen05.mma.block_scale adds it.

    c float32 ``[M, N]``; a ``[M, K]`` and b ``[N, K]`` E4M3 or E2M1 numbers as float32; scale_a
    ``[M, K / block]`` and scale_b ``[N, K / block]`` codes of the format, a block being 16 or 32
    columns. K is a multiple of 32 (kind mxf8f6f4) or 64 (mxf4, mxf4nvf4): one step per so many
    columns, in their order. The sign bit of an E4M3 scale counts for nothing. Returns float32
    ``[M, N]``.
    """
    how = _BLOCK_SCALED[kind]
    scaled_a = _scaled(np.asarray(a, np.float32), scale_a, scale_format, how)
    scaled_b = _scaled(np.asarray(b, np.float32), scale_b, scale_format, how)
    return _steps(c, scaled_a, scaled_b, how)


def accumulate(c: Float32, a: Factor, b: Factor, bits: int) -> Float32:
    """One step: ``c`` ``[M, N]`` and the terms of a ``[M, K]`` and b ``[N, K]``, each cut to
    ``bits`` places of the largest exponent, added exactly and cut to float32 ``[M, N]``.

    Term g is the exact product of both factors' columns ``g K / G`` to ``(g + 1) K / G``; its
    exponent is the sum of theirs.
    """
    if c.size <= _FEW:
        return _to_float32(_sum_of_cut(c, a, b, bits))
    rows = len(a.values)
    # Of both operands together, which halves the calls.
    largest = np.concatenate((a.exponents, b.exponents)).max(1)
    smallest = _last_bit(np.concatenate((a.values, b.values)))
    # No smaller than the largest exponent; where nothing lies below its last place, sums are exact.
    top = np.maximum(_exponent(c), largest[:rows, None] + largest[rows:])
    last = top - bits
    old = c * _power_of_two(-last)
    exact = (old == np.trunc(old)) & (last <= smallest[:rows, None] + smallest[rows:])
    total = c + a.values @ b.values.T
    cut = ~exact.all(1)
    if cut.any():
        part = Factor(a.values[cut], a.exponents[cut])
        total[cut] = _sum_of_cut(c[cut], part, b, bits)
    return _to_float32(total)


def _sum_of_cut(c: Float32, a: Factor, b: Factor, bits: int) -> Float64:
    """The sum before it is cut to float32."""
    exponents_a, exponents_b = (np.ascontiguousarray(factor.exponents.T) for factor in (a, b))
    terms = len(exponents_a)
    top = np.maximum(_exponent(c), (exponents_a[:, :, None] + exponents_b[:, None]).max(0))
    unit = _power_of_two(bits - top)
    # [G, K / G, R]
    values_a, values_b = (
        np.ascontiguousarray(factor.values.T).reshape(terms, -1, len(factor.values))
        for factor in (a, b)
    )
    columns_a = values_a.transpose(0, 2, 1)
    term = columns_a * values_b if values_b.shape[1] == 1 else columns_a @ values_b
    term *= unit
    np.trunc(term, out=term)
    return (np.trunc(c * unit) + term.sum(0)) / unit


def _steps(c: ArrayLike, a: Factor, b: Factor, kind: _Kind) -> Float32:
    total = np.asarray(c, np.float32)
    columns = a.values.shape[1]
    if columns % kind.columns:
        raise ValueError(f"{columns} columns are no multiple of {kind.columns}")
    terms = kind.columns // kind.together
    with np.errstate(invalid="ignore", over="ignore"):
        for step in range(columns // kind.columns):
            k = slice(step * kind.columns, (step + 1) * kind.columns)
            g = slice(step * terms, (step + 1) * terms)
            part_a, part_b = (Factor(x.values[:, k], x.exponents[:, g]) for x in (a, b))
            total = accumulate(total, part_a, part_b, kind.bits)
    return total


def _scaled(
    operand: Float32, scale: NDArray[np.uint8], scale_format: ScaleFormat, kind: _Kind
) -> Factor:
    block = operand.shape[1] // scale.shape[1]
    if scale_format == "ue8m0":
        size = E8M0[scale]
        exponents = scale.astype(np.int16) - 127
    else:
        size = E4M3[scale & 127]
        exponents = _exponent(size, -6)
    exponents = np.repeat(exponents, block // kind.together, 1)
    if kind.together == 1:
        exponents += _exponent(operand, -6)
    return Factor(operand * np.repeat(size.astype(np.float64), block, 1), exponents)


def _exponent(x: Float32, lowest: int = _ZERO) -> NDArray[np.int16]:
    """Exponents of float32 numbers, those of subnormals being ``lowest``."""
    field = (np.ascontiguousarray(x).view(np.int32) >> 23 & 255).astype(np.int16)
    exponent = np.maximum(field - 127, lowest)
    return exponent if lowest == _ZERO else np.where(x == 0, _ZERO, exponent).astype(np.int16)


def _power_of_two(exponent: NDArray[np.int16]) -> Float64:
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _last_bit(x: Float64) -> NDArray[np.int64]:
    """The exponent of the lowest bit in each row ``[R, K]``; large for a row of zeros."""
    pattern = x.view(np.int64)
    significand = (pattern & (1 << 52) - 1) | 1 << 52
    # The exponent's field of a power of two, which has 52 places below it.
    lowest = (significand & -significand).astype(np.float64).view(np.int64) >> 52
    exponent = (pattern >> 52 & 2047) + (lowest - 2 * 1023 - 52)
    return np.where(x == 0, 1 << 14, exponent).min(1)


def _to_float32(x: Float64) -> Float32:
    """float64 towards zero, but infinite from 2^128 on; no negative zero."""
    cut = (x.view(np.int64) & -(1 << 29)).view(np.float64)  # the 29 bits that float32 lacks
    size = np.abs(x)
    if size.min() >= 2.0**-126:
        return cut.astype(np.float32)
    small = size < 2.0**-126
    cut[small] = np.trunc(x[small] * 2.0**149) * 2.0**-149
    result = cut.astype(np.float32)
    result += np.float32(0)
    result[np.isnan(x)] = _NAN
    return result


class Codes:
    """The numbers of a 16-bit format: value and exponent of every bit pattern."""

    def __init__(self, values: Float32, lowest: int):
        """``lowest``: the exponent of the smallest normal number."""
        with np.errstate(invalid="ignore"):
            self._values = values.astype(np.float64)
        self._exponents = _exponent(values, lowest)

    def factor(self, codes: NDArray[np.uint16]) -> Factor:
        """Bit patterns ``[R, K]`` as a factor whose terms are single products."""
        return Factor(self._values[codes], self._exponents[codes])


_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
F16 = Codes(_PATTERNS.view(np.float16).astype(np.float32), -14)
"""IEEE half precision."""
BF16 = Codes(bf16_values(_PATTERNS), _ZERO)
"""bfloat16."""
CODES = {"f16": F16, "bf16": BF16}
"""By the name of the type."""
