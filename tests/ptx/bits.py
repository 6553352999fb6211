"""Instructions on bit fields and bytes."""

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import DTYPES, Array
from tests.ptx.scalar import Build, Handler, Lanewise, Values, apply, constant, elementwise
from tests.ptx.syntax import Immediate, Instruction


def _funnel(instruction: Instruction, layout: Layout) -> Handler:
    """shf: 32 of the 64 bits of two registers."""
    left = instruction.parts[1] == "l"
    clamp = instruction.parts[2] == "clamp"

    def shifted(low: Array, high: Array, by: Array) -> Array:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        amount = (np.minimum(by, 32) if clamp else by & 31).astype(np.uint64)
        result = both << amount >> np.uint64(32) if left else both >> amount
        return result.astype(np.uint32)

    return apply(shifted, instruction, layout, "b32")


def _permute(instruction: Instruction, layout: Layout) -> Handler:
    """prmt: each of four nibbles picks one of eight bytes, or the copies of its sign."""
    if instruction.opcode != "prmt.b32":
        raise Unsupported(instruction.text)

    selected = instruction.operands[3]
    if isinstance(selected, Immediate) and not selected.bits & 0x8888:
        return _permute_alike(selected.bits, instruction, layout)

    def permuted(low: Array, high: Array, selection: Array) -> Array:
        choices = _bytes_of_both(low, high)
        nibbles = selection[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        picked = np.take_along_axis(choices, (nibbles & 7).astype(np.int64), 1)
        sign = np.where(picked & 128, 255, 0)
        return np.where(nibbles & 8, sign, picked).astype(np.uint8).view(np.uint32)[:, 0]

    return apply(permuted, instruction, layout, "b32")


def _permute_alike(selection: int, instruction: Instruction, layout: Layout) -> Handler:
    """The same bytes for every lane."""
    places = selection >> np.arange(0, 16, 4) & 7

    def permuted(low: Array, high: Array, _: Array) -> Array:
        return _bytes_of_both(low, high).take(places, 1).view(np.uint32)[:, 0]

    return apply(permuted, instruction, layout, "b32")


def _bytes_of_both(low: Array, high: Array) -> Array:
    words = np.empty((low.size, 2), np.uint32)
    words[:, 0] = low
    words[:, 1] = high
    return words.view(np.uint8)


def _look_up(instruction: Instruction, layout: Layout) -> Handler:
    """lop3: bit 4a + 2b + c of the table, for every bit of three registers."""
    table = constant(instruction, 4)
    reads = [layout.source(operand, "b32") for operand in instruction.operands[1:4]]
    write = layout.target(instruction.operands[0], "b32")

    def looked_up(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros_like(a)
        for n in range(8):
            if table >> n & 1:
                result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return result

    return Lanewise(looked_up, reads, write)


def _extract(instruction: Instruction, layout: Layout) -> Handler:
    """bfe: ``length`` bits from ``position``; signed ones are extended by their last bit."""
    ptx_type = instruction.parts[-1]
    dtype = np.dtype(DTYPES[ptx_type])
    bits = 8 * dtype.itemsize
    value = layout.source(instruction.operands[1], ptx_type)
    field = [layout.source(operand, "u32") for operand in instruction.operands[2:]]
    write = layout.target(instruction.operands[0], ptx_type)

    def extracted(value: Array, position: Array, length: Array) -> Array:
        lanes = zip(value.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True)
        return np.array([_field(*lane, bits, dtype.kind == "i") for lane in lanes], dtype)

    return Lanewise(extracted, [value, *field], write)


def _field(x: int, position: int, length: int, bits: int, signed: bool) -> int:
    if length == 0:
        return 0
    # Bits beyond the register are copies of its sign, or zeros.
    field = (x >> min(position, bits)) & (1 << min(length, bits)) - 1
    if not signed:
        return field if position < bits else 0
    length = min(length, bits)
    top = min(position + length - 1, bits - 1)
    if x >> top & 1:
        return field | -1 << min(length, top - position + 1) if position <= top else -1
    return field


def _insert(instruction: Instruction, layout: Layout) -> Handler:
    """bfi: the low bits of the first operand into the second."""
    ptx_type = instruction.parts[-1]
    bits = 8 * np.dtype(DTYPES[ptx_type]).itemsize
    reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:3]]
    reads += [layout.source(operand, "u32") for operand in instruction.operands[3:]]
    write = layout.target(instruction.operands[0], ptx_type)

    def inserted(field: Array, value: Array, position: Array, length: Array) -> Array:
        out = value.copy()
        where = zip(field.tolist(), position.tolist(), length.tolist(), strict=True)
        for lane, (x, at, count) in enumerate(where):
            ones = ((1 << min(count & 255, bits)) - 1) << (at & 255) & (1 << bits) - 1
            out[lane] = (int(out[lane]) & ~ones) | (x << (at & 255) & ones)
        return out

    return Lanewise(inserted, reads, write)


def _count_ones(x: Array) -> Array:
    return np.bitwise_count(x).astype(np.uint32)


def _leading_zeros(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.array([bits - int(value).bit_length() for value in x], np.uint32)


def _find_highest(x: Array) -> Array:
    """bfind: the place of the highest bit that is set, -1 where there is none."""
    return np.array([int(value).bit_length() - 1 for value in x], np.int64).astype(np.uint32)


def _shift_to_highest(x: Array) -> Array:
    """bfind.shiftamt: by how much that bit would have to move to become the last one."""
    return np.where(x == 0, np.uint32(0xFFFFFFFF), _leading_zeros(x))


def _reversed(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.array([int(f"{value:0{bits}b}"[::-1], 2) for value in x.tolist()], x.dtype)


def _counted(function: Values) -> Build:
    """The result is a 32-bit number, whatever the operand is."""

    def build(instruction: Instruction, layout: Layout) -> Handler:
        return apply(function, instruction, layout, instruction.parts[-1], "u32")

    return build


BUILDS: dict[str, Build] = {
    "shf": _funnel,
    "prmt": _permute,
    "lop3": _look_up,
    "bfe": _extract,
    "bfi": _insert,
    "popc": _counted(_count_ones),
    "clz": _counted(_leading_zeros),
    "bfind.u32": _counted(_find_highest),
    "bfind.shiftamt.u32": _counted(_shift_to_highest),
    "brev": elementwise(_reversed),
}
