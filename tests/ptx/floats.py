"""Roundings to small floating-point formats, and sums that are rounded once."""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def bf16_bits(x: Array, towards_zero: bool = False) -> Array:
    """float32 to bfloat16 bit patterns (uint16), to nearest even unless towards zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits if towards_zero else bits + ((bits >> 16 & 1) + 0x7FFF)
    # A NaN may have been carried out of the register.
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded >> 16).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    """The float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e2m1_codes(x: Array) -> Array:
    """float32 to E2M1 codes (uint8), to nearest even, saturating; NaN becomes 6."""
    size = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for n, middle in enumerate(_E2M1_MIDDLES):
        code += (size >= middle) if n % 2 else (size > middle)
    code = code | np.signbit(x).astype(np.uint8) << 3
    return np.where(np.isnan(x), 7, code).astype(np.uint8)


def e4m3_codes(x: Array) -> Array:
    """float32 to E4M3 codes (uint8), to nearest even, saturating at 448; NaN stays NaN."""
    size = np.minimum(np.abs(np.nan_to_num(x, nan=0.0)).astype(np.float64), 448.0)
    exponent = np.maximum(np.frexp(np.where(size == 0, 1e-30, size))[1] - 1, -6)
    # In units of the last place, from 8 to 16 unless subnormal; a 16 carries into the exponent.
    units = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)
    code = np.minimum((exponent + 6) * 8 + units, 0x7E)
    code = np.where(np.isnan(x), 0x7F, code) | np.signbit(x).astype(np.int64) << 7
    return code.astype(np.uint8)


def e8m0_codes(x: Array, upwards: bool) -> Array:
    """float32 to E8M0 codes (uint8): exponents of powers of two, towards zero or upwards."""
    fraction, exponent = np.frexp(np.abs(np.nan_to_num(x)).astype(np.float64))
    code = exponent - 1 + 127 + ((fraction > 0.5) & upwards)
    code = np.where(fraction == 0, 0, np.clip(code, 0, 254))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def rounded_fma(x: Array, y: Array, z: Array) -> Array:
    """float32 x · y + z, rounded once."""
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    # Rounding again is harmless unless the first rounding made a tie for the second one.
    if not _may_be_ties(total).any():
        return total.astype(np.float32)
    addend = z.astype(np.float64)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    # The sum to odd: an inexact one with an even last bit moves to the side of its error, so that
    # rounding it again meets no false tie.
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & even
    odd = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)


def _may_be_ties(x: Array) -> Array:
    """Where float64 numbers lie half way between two of float32, or these are subnormal."""
    lowest = x.view(np.int64) & (1 << 29) - 1
    return (lowest == 1 << 28) | ((np.abs(x) < 2.0**-126) & (x != 0))


def exact_fma(x: Array, y: Array, z: Array) -> Array:
    """float64 x · y + z, rounded once, a lane at a time."""
    result = x * y + z
    for lane in np.flatnonzero(np.isfinite(result)):
        exact = Fraction(x[lane]) * Fraction(y[lane]) + Fraction(z[lane])
        if exact:
            result[lane] = float(exact)
    return result


def flush(x: Array) -> Array:
    """float32 with subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
