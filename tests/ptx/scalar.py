"""Arithmetic, logic, comparisons and moves: what every lane does for itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx import clock
from tests.ptx.faults import Trap, Unsupported
from tests.ptx.floats import bf16_bits, bf16_values, flush
from tests.ptx.operands import SHARED, Layout
from tests.ptx.rows import LANES, Array, Mask, Place, RowStore, Source, Target
from tests.ptx.syntax import Immediate, Instruction, Register, Special

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

# Runs an instruction in the lanes of the mask.
Handler = Callable[["Warp", Mask], Any]
Build = Callable[[Instruction, Layout], Handler]
Values = Callable[..., Array]

FLOATS = ("f16", "f32", "f64")


class Lanewise:
    """A handler of lanes that compute a function of their registers, which nobody else sees."""

    __slots__ = ("function", "reads", "write")

    def __init__(self, function: Values, reads: Sequence[Source], write: Target):
        self.function = function
        self.reads = tuple(reads)
        self.write = write

    def __call__(self, warp: "Warp", mask: Mask) -> None:
        self.write(warp, self.function(*[read(warp) for read in self.reads]), mask)


class InPlace(Lanewise):
    """A ufunc that writes the register's row itself."""

    __slots__ = ("place",)

    def __init__(self, function: np.ufunc, reads: Sequence[Source], place: Place):
        super().__init__(function, reads, RowStore(place))
        self.place = place

    def __call__(self, warp: "Warp", mask: Mask) -> None:
        values = [read(warp) for read in self.reads]
        self.function(*values, out=warp.rows[self.place], where=mask)


def unchanged(x: Array) -> Array:
    """What a move does."""
    return x


def elementwise(function: Values) -> Build:
    """An instruction whose result is a function of its operands, all of the last part's type."""

    def build(instruction: Instruction, layout: Layout) -> Handler:
        return apply(function, instruction, layout, instruction.parts[-1])

    return build


def apply(
    function: Values, instruction: Instruction, layout: Layout, ptx_type: str, result: str = ""
) -> Handler:
    """Writes ``function`` of the operands after the first, as values of a type, to the first."""
    reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:]]
    write = layout.target(instruction.operands[0], result or ptx_type)
    return Lanewise(_flushed(function) if "ftz" in instruction.parts else function, reads, write)


def _flushed(function: Values) -> Values:
    return lambda *values: flush(function(*[flush(value) for value in values]))


def ufunc(function: np.ufunc) -> Build:
    """The fast form of ``elementwise``: numpy writes the register's row itself."""

    def build(instruction: Instruction, layout: Layout) -> Handler:
        ptx_type = instruction.parts[-1]
        if ptx_type in PACKED or "ftz" in instruction.parts or len(instruction.operands) != 3:
            return many(function, instruction, layout)
        reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:]]
        return InPlace(function, reads, layout.row_in_place(instruction.operands[0], ptx_type))

    return build


def many(function: Values, instruction: Instruction, layout: Layout) -> Handler:
    """More than two operands, or several numbers in a register."""
    ptx_type = instruction.parts[-1]

    def folded(first: Array, second: Array, *more: Array) -> Array:
        result = function(first, second)
        return folded(result, *more) if more else result

    if ptx_type in PACKED:
        return apply(PACKED[ptx_type](folded), instruction, layout, ptx_type)
    return apply(folded, instruction, layout, ptx_type)


def _pairs_of_bf16(function: Values) -> Values:
    def values(*operands: Array) -> Array:
        halves = [bf16_values(operand.view(np.uint16)) for operand in operands]
        return bf16_bits(function(*halves)).view(np.uint32)

    return values


def _pairs_of(dtype: Any) -> Callable[[Values], Values]:
    def pairs(function: Values) -> Values:
        def values(*operands: Array) -> Array:
            out = function(*[operand.view(dtype) for operand in operands])
            return np.ascontiguousarray(out, dtype).view(operands[0].dtype)

        return values

    return pairs


PACKED: dict[str, Callable[[Values], Values]] = {
    "bf16x2": _pairs_of_bf16,
    "f16x2": _pairs_of(np.float16),
    "f32x2": _pairs_of(np.float32),
    "u16x2": _pairs_of(np.uint16),
    "s16x2": _pairs_of(np.int16),
}


def _move(instruction: Instruction, layout: Layout) -> Handler:
    if instruction.operands[1] == Special(clock.CLOCK):
        return clock.read(instruction, layout)
    ptx_type = instruction.parts[-1]
    read = layout.source(instruction.operands[1], ptx_type)
    return Lanewise(unchanged, [read], layout.target(instruction.operands[0], ptx_type))


def _generic(instruction: Instruction, layout: Layout) -> Handler:
    """cvta: shared memory is a window of the generic addresses, everything else is its own."""
    shared = any(part.startswith("shared") for part in instruction.parts)
    offset = np.uint64(SHARED if shared else 0)
    change = np.subtract if "to" in instruction.parts else np.add
    return elementwise(lambda address: change(address, offset))(instruction, layout)


def _not(instruction: Instruction, layout: Layout) -> Handler:
    return apply(np.invert, instruction, layout, instruction.parts[-1])


_COMPARISONS: dict[str, Values] = {
    "eq": np.equal,
    "ne": lambda x, y: (x != y) & ~_unordered(x, y),
    "lt": np.less,
    "lo": np.less,
    "le": np.less_equal,
    "ls": np.less_equal,
    "gt": np.greater,
    "hi": np.greater,
    "ge": np.greater_equal,
    "hs": np.greater_equal,
    "equ": lambda x, y: (x == y) | _unordered(x, y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~_unordered(x, y),
    "nan": lambda x, y: _unordered(x, y),
}
_JOINED: dict[str, Values] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _unordered(x: Array, y: Array) -> Array:
    return (x != x) | (y != y)


def _compare(instruction: Instruction, layout: Layout) -> Handler:
    parts = instruction.parts
    ptx_type = parts[-1]
    compare = _COMPARISONS[parts[1]]
    if ptx_type not in FLOATS and parts[1] == "ne":
        compare = np.not_equal
    reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:3]]
    joined = _JOINED.get(parts[2])
    if joined is None:
        if isinstance(compare, np.ufunc) and isinstance(instruction.operands[0], Register):
            return InPlace(compare, reads, layout.row_in_place(instruction.operands[0], "pred"))
        return Lanewise(compare, reads, layout.target(instruction.operands[0], "pred"))

    def compared(first: Array, second: Array, third: Array) -> Array:
        return joined(compare(first, second), third)

    reads.append(layout.source(instruction.operands[3], "pred"))
    return Lanewise(compared, reads, layout.target(instruction.operands[0], "pred"))


def _select(instruction: Instruction, layout: Layout) -> Handler:
    ptx_type = instruction.parts[-1]
    reads = [layout.source(operand, ptx_type) for operand in instruction.operands[1:3]]
    predicate = layout.source(instruction.operands[3], "pred")
    write = layout.target(instruction.operands[0], ptx_type)
    return Lanewise(np.where, [predicate, *reads], write)


def constant(instruction: Instruction, index: int) -> int:
    """An operand that must be a number in the text."""
    operand = instruction.operands[index]
    if not isinstance(operand, Immediate):
        raise Unsupported(instruction.text)
    return operand.bits


def nothing(instruction: Instruction, layout: Layout) -> Handler:
    """An instruction without an effect that the machine could show."""
    return lambda warp, mask: None


def _trap(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        raise Trap(str(warp))

    return run


def _policy(instruction: Instruction, layout: Layout) -> Handler:
    """createpolicy: a number that the machine, which has no caches, does not look at."""
    write = layout.target(instruction.operands[0], "u64")
    return lambda warp, mask: write(warp, np.zeros(LANES, np.uint64), mask)


BUILDS: dict[str, Build] = {
    "and": ufunc(np.bitwise_and),
    "or": ufunc(np.bitwise_or),
    "xor": ufunc(np.bitwise_xor),
    "not": _not,
    "mov": _move,
    "cvta": _generic,
    "setp": _compare,
    "selp": _select,
    "trap": _trap,
    "createpolicy": _policy,
}
