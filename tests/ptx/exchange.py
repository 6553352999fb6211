"""What the lanes of a warp tell each other: shuffles, votes, elections, transposed matrices."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask, lanes
from tests.ptx.scalar import Build, Handler, nothing
from tests.ptx.syntax import Immediate, Instruction, Pair

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

_LANES = np.arange(LANES, dtype=np.int64)


def _elect(instruction: Instruction, layout: Layout) -> Handler:
    """One lane is elected, the same one every time; which, the ISA leaves open."""
    found, chosen = _pair(instruction)
    write_lane = layout.target(found, "u32")
    write_chosen = layout.target(chosen, "pred")

    def run(warp: "Warp", mask: Mask) -> None:
        active = np.flatnonzero(lanes(mask))
        leader = active[int(warp.block.cluster.elected * (active.size - 1))]
        write_lane(warp, np.full(LANES, leader, np.uint32), mask)
        write_chosen(warp, leader == _LANES, mask)

    return run


def _pair(instruction: Instruction) -> Pair:
    operand = instruction.operands[0]
    if not isinstance(operand, Pair):
        raise Unsupported(instruction.text)
    return operand


def _shuffle(instruction: Instruction, layout: Layout) -> Handler:
    """shfl.sync: d|p, a, b, c; c holds the clamp (bits 0-4) and the segment mask (bits 8-12)."""
    mode = instruction.parts[2]
    result = instruction.operands[0]
    inside_target = None
    if isinstance(result, Pair):
        inside_target = layout.target(result.second, "pred")
        result = result.first
    write = layout.target(result, "b32")
    value, by, limits = (layout.source(operand, "u32") for operand in instruction.operands[1:4])
    constants = [operand for operand in instruction.operands[2:4] if isinstance(operand, Immediate)]
    known = None
    if len(constants) == 2:
        known = _sources(mode, *(np.full(LANES, constant.bits) for constant in constants))

    def run(warp: "Warp", mask: Mask) -> None:
        source, inside = known or _sources(mode, by(warp), limits(warp))
        write(warp, value(warp)[source], mask)
        if inside_target is not None:
            inside_target(warp, inside, mask)

    return run


def _sources(mode: str, by: Array, limits: Array) -> tuple[Array, Array]:
    """The lane whose value each lane gets, and whether it is one of those that it may ask."""
    amount = (by & 31).astype(np.int64)
    segment = (limits >> 8 & 31).astype(np.int64)
    clamp = (limits & 31).astype(np.int64)
    top = (_LANES & segment) | (clamp & ~segment)
    if mode == "up":
        source = _LANES - amount
        inside = source >= top
    else:
        others = {
            "down": _LANES + amount,
            "bfly": _LANES ^ amount,
            "idx": (_LANES & segment) | (amount & ~segment),
        }
        source = others[mode]
        inside = source <= top
    return np.where(inside, source & 31, _LANES), inside


def _vote(instruction: Instruction, layout: Layout) -> Handler:
    mode = instruction.parts[2]
    predicate = layout.source(instruction.operands[1], "pred")
    write = layout.target(instruction.operands[0], instruction.parts[-1])

    def run(warp: "Warp", mask: Mask) -> None:
        active = lanes(mask)
        votes = predicate(warp) & active
        if mode == "ballot":
            bits = int(np.sum(np.uint64(1) << _LANES[votes].astype(np.uint64)))
            write(warp, np.full(LANES, bits, np.uint32), mask)
            return
        count = votes.sum()
        result = {
            "any": count > 0,
            "all": count == active.sum(),
            "uni": count in (0, active.sum()),
        }[mode]
        write(warp, np.full(LANES, result), mask)

    return run


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def _reduce(instruction: Instruction, layout: Layout) -> Handler:
    ptx_type = instruction.parts[-1]
    reduction = _REDUCTIONS[instruction.parts[2]]
    if set(instruction.parts[3:-1]):
        raise Unsupported(instruction.text)
    value = layout.source(instruction.operands[1], ptx_type)
    write = layout.target(instruction.operands[0], ptx_type)

    def run(warp: "Warp", mask: Mask) -> None:
        values = value(warp)
        write(warp, np.full(LANES, reduction(values[lanes(mask)]), values.dtype), mask)

    return run


def _match(instruction: Instruction, layout: Layout) -> Handler:
    """match.any.sync: the lanes that hold the value of each lane."""
    if instruction.parts[1] != "any":
        raise Unsupported(instruction.text)
    value = layout.source(instruction.operands[1], instruction.parts[-1])
    write = layout.target(instruction.operands[0], "b32")

    def run(warp: "Warp", mask: Mask) -> None:
        values = value(warp)
        equal = (values[:, None] == values) & lanes(mask)
        bits = (equal * (np.uint64(1) << _LANES.astype(np.uint64))).sum(1)
        write(warp, bits.astype(np.uint32), mask)

    return run


def _transpose(instruction: Instruction, layout: Layout) -> Handler:
    """movmatrix: 16-bit ``[8, 8]``; of it and of the result lane l has columns 2 (l % 4) and one
    more of row l / 4.
    """
    if instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise Unsupported(instruction.text)
    value = layout.source(instruction.operands[1], "b32")
    write = layout.target(instruction.operands[0], "b32")

    def run(warp: "Warp", mask: Mask) -> None:
        rows = np.ascontiguousarray(value(warp)).view(np.uint16).reshape(8, 8)
        write(warp, np.ascontiguousarray(rows.T).reshape(-1).view(np.uint32), mask)

    return run


def _active_mask(instruction: Instruction, layout: Layout) -> Handler:
    write = layout.target(instruction.operands[0], "u32")

    def run(warp: "Warp", mask: Mask) -> None:
        bits = sum(1 << int(lane) for lane in np.flatnonzero(lanes(mask)))
        write(warp, np.full(LANES, bits, np.uint32), mask)

    return run


BUILDS: dict[str, Build] = {
    "elect": _elect,
    "shfl": _shuffle,
    "vote": _vote,
    "redux": _reduce,
    "match": _match,
    "movmatrix": _transpose,
    "activemask": _active_mask,
    "nop": nothing,
    "nanosleep": nothing,
}
