"""How far bfloat16 results are from the exact values that they stand for."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rounding(NamedTuple):
    """Shares of results: correctly rounded, one unit in the last place away; and the worst."""

    correct: float
    one_ulp: float
    worst_ulps: int


def bf16_codes(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Finite float64 values as bfloat16 bit patterns, rounded once, to nearest even."""
    exponent = np.maximum(np.frexp(values)[1] - 1, -126)
    rounded = np.ldexp(np.rint(np.ldexp(values, 7 - exponent)), exponent - 7)
    return (rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def rounding(results: NDArray[np.uint16], exact: NDArray[np.float64]) -> Rounding:
    """Compare finite bfloat16 bit patterns with exact values of the same shape.

    The distance counts the bfloat16 numbers from the result to the correctly rounded value; both
    zeros are one number. One NaN or infinity among the results is a ValueError.
    """
    if (results & 0x7F80 == 0x7F80).any():
        raise ValueError("a result is NaN or infinite")
    ulps = np.abs(_order(results) - _order(bf16_codes(exact)))
    return Rounding(float((ulps == 0).mean()), float((ulps == 1).mean()), int(ulps.max()))


def _order(codes: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The place of bfloat16 numbers in their order."""
    size = (codes & 0x7FFF).astype(np.int64)
    return np.where(codes & 0x8000, -size, size)
