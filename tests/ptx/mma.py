"""mma.sync: products of one warp, all operands in registers."""

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import tensor_core
from tests.ptx.convergence import whole
from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask
from tests.ptx.scalar import Build, Handler
from tests.ptx.syntax import Instruction, Vector

if TYPE_CHECKING:
    from tests.ptx.warp import Warp


def rows_of_a(codes: Array) -> Array:
    """16-bit ``[16, 16]`` of registers uint32 ``[4, 32]``: of lane l columns 2 (l % 4) and one more
    of row l / 4, then of row + 8, then both with columns + 8.
    """
    # (half of the columns, half of the rows, row, column pair, column)
    parts = np.ascontiguousarray(codes).view(np.uint16).reshape(2, 2, 8, 4, 2)
    return parts.transpose(1, 2, 0, 3, 4).reshape(16, 16)


def rows_of_b(codes: Array) -> Array:
    """16-bit ``[8, 16]``, K last, of registers uint32 ``[2, 32]``: of lane l K = 2 (l % 4) and one
    more of column l / 4, then K + 8.
    """
    parts = np.ascontiguousarray(codes).view(np.uint16).reshape(2, 8, 4, 2)
    return parts.transpose(1, 0, 2, 3).reshape(8, 16)


def rows_of_c(values: Array) -> Array:
    """``[16, 8]`` of registers ``[4, 32]``: of lane l columns 2 (l % 4) and one more of row l / 4,
    then of row + 8.
    """
    return values.reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)


def registers_of_c(rows: Array) -> Array:
    """The inverse of ``rows_of_c``."""
    return rows.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)


def _multiply(instruction: Instruction, layout: Layout) -> Handler:
    kind = instruction.parts[-2]
    known = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    if kind not in tensor_core.CODES or instruction.opcode != known:
        raise Unsupported(instruction.text)
    vectors = [operand for operand in instruction.operands if isinstance(operand, Vector)]
    result, *sources = [vector.items for vector in vectors]
    a, b = ([layout.source(item, "b32") for item in items] for items in sources[:2])
    c = [layout.source(item, "f32") for item in sources[2]]
    writes = [layout.target(item, "f32") for item in result]
    numbers = tensor_core.CODES[kind]

    def run(warp: "Warp", mask: Mask) -> None:
        whole(warp, mask, "mma")
        rows = numbers.factor(rows_of_a(np.array([read(warp) for read in a])))
        columns = numbers.factor(rows_of_b(np.array([read(warp) for read in b])))
        old = rows_of_c(np.array([read(warp) for read in c]))
        sums = registers_of_c(tensor_core.mma_16_bit(old, rows, columns))
        for write, row in zip(writes, sums, strict=True):
            write(warp, row, mask)

    return run


BUILDS: dict[str, Build] = {"mma.sync": _multiply}
