"""tcgen05.mma, tcgen05.cp and tcgen05.commit: what one thread asks of the tensor core.

Work of one thread happens in the order of its instructions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import tensor_core
from tests.ptx.convergence import only
from tests.ptx.descriptors import SharedMatrix
from tests.ptx.faults import BadDescriptor, Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import Mask, Source, lanes
from tests.ptx.scalar import Build, Handler
from tests.ptx.syntax import Address, Instruction, Vector
from tests.ptx.tensor_memory import ROWS
from tests.ptx.tma import OFFSET
from tests.ptx.umma_operands import (
    Formats,
    check_rows,
    decoded,
    first_operand,
    scales_of,
    second_operand,
    set_sums,
    sums_of,
)

if TYPE_CHECKING:
    from tests.ptx.cluster import Block
    from tests.ptx.warp import Warp


def _blocks(warp: "Warp", pair: bool) -> list["Block"]:
    """The blocks that take part: one, or the pair whose first block issues the instruction."""
    if not pair:
        return [warp.block]
    rank = warp.block.rank
    blocks = warp.block.cluster.blocks
    if rank % 2 or rank + 1 >= len(blocks):
        raise BadDescriptor(f"cta_group::2 issued by block {rank} of {len(blocks)}")
    return blocks[rank : rank + 2]


def _in_order(warp: "Warp", mask: Mask, work: Callable[[], None]) -> None:
    line = ("tcgen05", warp.block.rank, warp.index, int(lanes(mask).argmax()))
    warp.block.cluster.asynchronous.add_in_order(line, work)


def _commit(instruction: Instruction, layout: Layout) -> Handler:
    """An arrival when all of the thread's earlier work has happened."""
    where = layout.address(instruction.operands[0])
    blocks = None
    if "multicast" in instruction.opcode:
        blocks = layout.source(instruction.operands[1], "u16")

    def run(warp: "Warp", mask: Mask) -> None:
        cluster = warp.block.cluster
        bar = only(where(warp), mask)
        targets = [bar]
        if blocks is not None:
            ranks = cluster.ranks(only(blocks(warp), mask))
            targets = [bar & OFFSET | rank << 24 for rank in ranks]

        def arrive() -> None:
            for target in targets:
                cluster.barrier(target).arrive()

        _in_order(warp, mask, arrive)

    return run


def _copy(instruction: Instruction, layout: Layout) -> Handler:
    """tcgen05.cp.32x128b.warpx4: 32 rows of 16 bytes to all quarters of the lanes."""
    if instruction.parts[3:] != ("32x128b", "warpx4"):
        raise Unsupported(instruction.text)
    pair = "cta_group::2" in instruction.parts
    where = layout.address(instruction.operands[0])
    descriptor = layout.source(instruction.operands[1], "u64")

    def run(warp: "Warp", mask: Mask) -> None:
        column = only(where(warp), mask) & 0xFFFF
        matrix = SharedMatrix.of_tcgen05(only(descriptor(warp), mask))
        blocks = _blocks(warp, pair)

        def happen() -> None:
            for block in blocks:
                raw = matrix.rows(block.readable_memory("tcgen05.cp"), 32, 16, "tcgen05.cp")
                words = np.ascontiguousarray(raw).view(np.uint32)
                block.tensor_memory.set_block(column, np.tile(words, (4, 1)), "tcgen05.cp")

        _in_order(warp, mask, happen)

    return run


def _multiply(instruction: Instruction, layout: Layout) -> Handler:
    kind = next(p for p in instruction.parts if p.startswith("kind::")).removeprefix("kind::")
    if "ashift" in instruction.parts or "sp" in instruction.parts or "ws" in instruction.parts:
        raise Unsupported(instruction.text)
    if kind == "f16":
        return _dense(instruction, layout)
    if kind in ("mxf8f6f4", "mxf4", "mxf4nvf4"):
        return _block_scaled(instruction, layout, kind)
    raise Unsupported(instruction.text)


def _operand(operand: object, layout: Layout) -> tuple[Source, bool]:
    """The first operand: (where, whether it is in tensor memory)."""
    if isinstance(operand, Address):
        return layout.address(operand), True
    return layout.source(operand, "u64"), False  # type: ignore[arg-type]


def _dense(instruction: Instruction, layout: Layout) -> Handler:
    """kind::f16 with bf16 operands."""
    operands = instruction.operands
    sums = layout.address(operands[0])
    first, in_tensor_memory = _operand(operands[1], layout)
    second = layout.source(operands[2], "u64")
    descriptor = layout.source(operands[3], "u32")
    disabled = [
        layout.source(item, "u32")
        for operand in operands[4:]
        if isinstance(operand, Vector)
        for item in operand.items
    ]
    adds = layout.source(operands[5 if disabled else 4], "pred")
    if len(operands) > (6 if disabled else 5):
        raise Unsupported(instruction.text)
    pair = "cta_group::2" in instruction.parts

    def run(warp: "Warp", mask: Mask) -> None:
        if any(only(read(warp), mask) for read in disabled):
            raise Unsupported(f"disabled lanes: {warp}")
        formats = Formats.of_f16(only(descriptor(warp), mask))
        blocks = _blocks(warp, pair)
        check_rows(formats, len(blocks))
        a = only(first(warp), mask)
        b = SharedMatrix.of_tcgen05(only(second(warp), mask))
        column = only(sums(warp), mask) & 0xFFFF
        add = bool(only(adds(warp), mask))

        def happen() -> None:
            columns = _numbers(second_operand(b, formats, blocks))
            for block in blocks:
                rows = _numbers(first_operand(block, a, in_tensor_memory))
                c = sums_of(block, column, formats.columns, add)
                set_sums(block, column, tensor_core.mma_16_bit(c, rows, columns))

        _in_order(warp, mask, happen)

    return run


def _numbers(raw: np.ndarray) -> tensor_core.Factor:
    return tensor_core.BF16.factor(raw.view(np.uint16))


def _block_scaled(instruction: Instruction, layout: Layout, kind: str) -> Handler:
    operands = instruction.operands
    if isinstance(operands[1], Address):
        raise Unsupported(f"{instruction.text}: a in tensor memory")
    sums, scales_a, scales_b = (layout.address(operands[n]) for n in (0, 4, 5))
    first, second = (layout.source(operands[n], "u64") for n in (1, 2))
    descriptor = layout.source(operands[3], "u32")
    adds = layout.source(operands[6], "pred")
    pair = "cta_group::2" in instruction.parts
    # Scales per row of one instruction: 32 columns (mxf8f6f4) or 64 of them.
    per_row = 4 if "block16" in instruction.parts else 2
    if kind == "mxf8f6f4":
        per_row = 1

    def run(warp: "Warp", mask: Mask) -> None:
        formats = Formats.of_block_scaled(only(descriptor(warp), mask))
        blocks = _blocks(warp, pair)
        check_rows(formats, len(blocks))
        a = only(first(warp), mask)
        b = SharedMatrix.of_tcgen05(only(second(warp), mask))
        column = only(sums(warp), mask) & 0xFFFF
        at_a, at_b = (only(read(warp), mask) & 0xFFFF for read in (scales_a, scales_b))
        add = bool(only(adds(warp), mask))

        def happen() -> None:
            values_b = decoded(second_operand(b, formats, blocks), formats.b, kind)
            for block in blocks:
                values_a = decoded(first_operand(block, a, False), formats.a, kind)
                sa = scales_of(block, at_a, ROWS, formats.scale_a, per_row)
                sb = scales_of(block, at_b, formats.columns, formats.scale_b, per_row)
                c = sums_of(block, column, formats.columns, add)
                set_sums(
                    block,
                    column,
                    tensor_core.block_scaled_mma(
                        c, values_a, values_b, sa, sb, kind, formats.scale_format
                    ),
                )

        _in_order(warp, mask, happen)

    return run


BUILDS: dict[str, Build] = {
    "tcgen05.mma": _multiply,
    "tcgen05.cp": _copy,
    "tcgen05.commit": _commit,
}
