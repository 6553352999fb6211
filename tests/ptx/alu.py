"""Arithmetic of integers and floating-point numbers."""

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.floats import exact_fma, rounded_fma
from tests.ptx.operands import Layout
from tests.ptx.rows import DTYPES, Array
from tests.ptx.scalar import (
    FLOATS,
    PACKED,
    Build,
    Handler,
    Lanewise,
    Values,
    apply,
    elementwise,
    many,
    ufunc,
)
from tests.ptx.syntax import Immediate, Instruction


def _minimum(x: Array, y: Array) -> Array:
    """The number that is not NaN, -0 before +0."""
    if x.dtype.kind != "f":
        return np.minimum(x, y)
    return np.where((x == y) & np.signbit(x), x, np.fmin(x, y))


def _maximum(x: Array, y: Array) -> Array:
    if x.dtype.kind != "f":
        return np.maximum(x, y)
    return np.where((x == y) & ~np.signbit(x), x, np.fmax(x, y))


def _extreme(function: Values, strict: Values) -> Build:
    def build(instruction: Instruction, layout: Layout) -> Handler:
        return many(strict if "NaN" in instruction.parts else function, instruction, layout)

    return build


def _fused(instruction: Instruction, layout: Layout) -> Handler:
    ptx_type = instruction.parts[-1]
    if ptx_type == "f32":
        return apply(rounded_fma, instruction, layout, ptx_type)
    if ptx_type == "f64":
        return apply(exact_fma, instruction, layout, ptx_type)
    if ptx_type == "f32x2":
        return apply(PACKED[ptx_type](rounded_fma), instruction, layout, ptx_type)
    if ptx_type == "bf16x2":
        return apply(PACKED[ptx_type](_wide_fma), instruction, layout, ptx_type)
    raise Unsupported(instruction.text)


def _wide_fma(x: Array, y: Array, z: Array) -> Array:
    """float32 operands of eight significant bits: the product is exact."""
    return rounded_fma(x, y, z)


def _multiply(instruction: Instruction, layout: Layout) -> Handler:
    parts = instruction.parts
    ptx_type = parts[-1]
    if "wide" in parts or "hi" in parts:
        return _wide_product(instruction, layout)
    if ptx_type in FLOATS or ptx_type in PACKED or "lo" in parts:
        if parts[0] == "mad":
            return apply(_low_mad, instruction, layout, ptx_type)
        return ufunc(np.multiply)(instruction, layout)
    raise Unsupported(instruction.text)


def _low_mad(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


def _wide_product(instruction: Instruction, layout: Layout) -> Handler:
    """mul and mad, wide or hi."""
    ptx_type = instruction.parts[-1]
    bits = 8 * np.dtype(DTYPES[ptx_type]).itemsize
    high = "hi" in instruction.parts
    if bits == 64:
        raise Unsupported(instruction.text)
    wide = f"{ptx_type[0]}{2 * bits}"
    result = ptx_type if high else wide
    reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:3]]
    reads += [layout.source(operand, result) for operand in instruction.operands[3:]]
    write = layout.target(instruction.operands[0], result)
    dtype = DTYPES[wide]

    def multiplied(first: Array, second: Array, *more: Array) -> Array:
        product = np.multiply(first, second, dtype=dtype)
        if high:
            product = (product >> bits).astype(DTYPES[ptx_type])
        for addend in more:
            product = product + addend
        return product

    return Lanewise(multiplied, reads, write)


def _divide(instruction: Instruction, layout: Layout) -> Handler:
    if instruction.parts[-1] in FLOATS:
        return ufunc(np.divide)(instruction, layout)
    return elementwise(_quotient)(instruction, layout)


def _quotient(x: Array, y: Array) -> Array:
    """Towards zero. A division by zero gives all ones, which nobody should use."""
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    quotient = x // safe
    if x.dtype.kind == "i":
        quotient = quotient + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    return np.where(y == 0, -1 if x.dtype.kind == "i" else np.iinfo(x.dtype).max, quotient).astype(
        x.dtype
    )


def _remainder(x: Array, y: Array) -> Array:
    return np.where(y == 0, x, x - _quotient(x, y) * y).astype(x.dtype)


def _shift(function: Values) -> Build:
    """Shifts by 32-bit amounts; those beyond the width leave zeros, or copies of the sign."""

    def build(instruction: Instruction, layout: Layout) -> Handler:
        ptx_type = instruction.parts[-1]
        value = layout.source(instruction.operands[1], ptx_type)
        amount = layout.source(instruction.operands[2], "u32")
        write = layout.target(instruction.operands[0], ptx_type)
        dtype = np.dtype(DTYPES[ptx_type])
        bits = 8 * dtype.itemsize
        by_constant = instruction.operands[2]
        if isinstance(by_constant, Immediate) and by_constant.bits < bits:
            constant = dtype.type(by_constant.bits)
            return Lanewise(lambda x: function(x, constant), [value], write)

        def shifted(x: Array, by: Array) -> Array:
            result = function(x, np.minimum(by, bits - 1).astype(dtype))
            if dtype.kind == "u" and (by >= bits).any():
                result = np.where(by >= bits, 0, result).astype(dtype)
            return result

        return Lanewise(shifted, [value, amount], write)

    return build


def in_double(function: Values) -> Values:
    """A float32 function, computed in float64 and rounded: what approximations are close to."""

    def values(x: Array) -> Array:
        return function(x.astype(np.float64)).astype(np.float32)

    return values


def _reciprocal(instruction: Instruction, layout: Layout) -> Handler:
    if instruction.parts[-1] != "f64":
        return elementwise(in_double(np.reciprocal))(instruction, layout)
    read = layout.source(instruction.operands[1], "f64")
    write = layout.target(instruction.operands[0], "f64")
    return Lanewise(lambda x: _upper_half(1 / _upper_half(x)), [read], write)


def _upper_half(x: Array) -> Array:
    """float64 with zeros in the lower 32 bits: all that an approximation looks at and gives."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64)


BUILDS: dict[str, Build] = {
    "add": ufunc(np.add),
    "sub": ufunc(np.subtract),
    "neg": elementwise(np.negative),
    "abs": elementwise(np.abs),
    "mul": _multiply,
    "mad": _multiply,
    "fma": _fused,
    "div": _divide,
    "rem": elementwise(_remainder),
    "min": _extreme(_minimum, np.minimum),
    "max": _extreme(_maximum, np.maximum),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "ex2": elementwise(in_double(np.exp2)),
    "lg2": elementwise(in_double(np.log2)),
    "rcp": _reciprocal,
    "sqrt": elementwise(in_double(np.sqrt)),
    "rsqrt": elementwise(in_double(lambda x: 1 / np.sqrt(x))),
    "tanh": elementwise(in_double(np.tanh)),
}
