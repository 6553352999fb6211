"""Operands of tcgen05.mma: instruction descriptors, matrices, scales and sums."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.ptx import tensor_core
from tests.ptx.descriptors import SharedMatrix
from tests.ptx.faults import BadDescriptor, Unsupported
from tests.ptx.rows import Array
from tests.ptx.tensor_memory import ROWS

if TYPE_CHECKING:
    from tests.ptx.cluster import Block

_STEP_BYTES = 32
_E4M3 = 0
_E2M1_IN_BYTES = 5
_E2M1_PACKED = 1


class Formats(NamedTuple):
    """What an instruction descriptor says; the scale ids pick bytes of the scales' cells."""

    rows: int
    columns: int
    a: int
    b: int
    scale_format: tensor_core.ScaleFormat
    scale_a: int
    scale_b: int

    @classmethod
    def of_f16(cls, bits: int) -> "Formats":
        """A descriptor of kind::f16: bf16 operands, float32 sums, nothing negated or transposed."""
        if bits & 0xF or bits >> 4 & 3 != 1 or bits >> 13 & 15 or bits >> 29:
            raise BadDescriptor(f"instruction descriptor {bits:#x}")
        if (bits >> 7 & 7, bits >> 10 & 7) != (1, 1):
            raise BadDescriptor(f"instruction descriptor {bits:#x}: operands are not bf16")
        return cls((bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, 1, 1, "ue8m0", 0, 0)

    @classmethod
    def of_block_scaled(cls, bits: int) -> "Formats":
        """A descriptor of a block-scaled kind."""
        if bits & 0xF or bits >> 13 & 15 or bits >> 24 & 7 or bits >> 31:
            raise BadDescriptor(f"instruction descriptor {bits:#x}")
        return cls(
            (bits >> 27 & 3) * 128,
            (bits >> 17 & 63) * 8,
            bits >> 7 & 7,
            bits >> 10 & 7,
            "ue8m0" if bits >> 23 & 1 else "ue4m3",
            bits >> 29 & 3,
            bits >> 4 & 3,
        )


def check_rows(formats: Formats, blocks: int) -> None:
    if formats.rows != ROWS * blocks:
        raise BadDescriptor(f"{formats.rows} rows by {blocks} blocks")
    if formats.columns % 16 or not 16 <= formats.columns <= 256:
        raise BadDescriptor(f"{formats.columns} columns")


def first_operand(block: "Block", a: int, in_tensor_memory: bool) -> Array:
    """uint8 ``[128, 32]``: a block's rows of the first operand."""
    if in_tensor_memory:
        words = block.tensor_memory.block(a & 0xFFFF, _STEP_BYTES // 4, "tcgen05.mma, operand a")
        return np.ascontiguousarray(words).view(np.uint8)
    memory = block.readable_memory("tcgen05.mma")
    return SharedMatrix.of_tcgen05(a).rows(memory, ROWS, _STEP_BYTES, "tcgen05.mma, operand a")


def second_operand(b: SharedMatrix, formats: Formats, blocks: list["Block"]) -> Array:
    """uint8 ``[columns, 32]``: the second operand, of which every block holds an equal part."""
    count = formats.columns // len(blocks)
    what = "tcgen05.mma, operand b"
    parts = [b.rows(block.readable_memory(what), count, _STEP_BYTES, what) for block in blocks]
    return np.ascontiguousarray(np.concatenate(parts))


def sums_of(block: "Block", column: int, count: int, add: bool) -> Array:
    cells = block.tensor_memory.block(column, count, "tcgen05.mma")
    return cells.view(np.float32) if add else np.zeros((ROWS, count), np.float32)


def set_sums(block: "Block", column: int, sums: Array) -> None:
    block.tensor_memory.set_block(column, sums.view(np.uint32), "tcgen05.mma")


def decoded(raw: Array, format: int, kind: str) -> Array:
    """float32 ``[R, K]`` of the bytes ``[R, 32]`` of an operand."""
    if kind != "mxf8f6f4":
        if format != _E2M1_PACKED:
            raise BadDescriptor(f"operand format {format} of {kind}")
        return tensor_core.e2m1_values(raw)
    if format == _E4M3:
        return tensor_core.E4M3[raw]
    if format == _E2M1_IN_BYTES:
        # Sixteen codes lie in the first eight of sixteen bytes.
        packed = raw.reshape(raw.shape[0], -1, 16)[:, :, :8]
        return tensor_core.e2m1_values(np.ascontiguousarray(packed).reshape(raw.shape[0], -1))
    raise Unsupported(f"operand format {format} of {kind}")


def scales_of(block: "Block", column: int, rows: int, byte: int, per_row: int) -> Array:
    """uint8 ``[rows, per_row]``: row r's scales are bytes of lane r % 32, column r / 32.

    Every quarter of the lanes must hold the same.
    """
    cells = block.tensor_memory.block(column, -(-rows // 32), "tcgen05.mma, scales")
    quarters = cells.reshape(4, 32, -1)
    if (quarters != quarters[0]).any():
        raise BadDescriptor(f"block {block.rank}: scales differ between the quarters of the lanes")
    if byte + per_row > 4:
        raise BadDescriptor(f"scale id {byte} with {per_row} scales per row")
    codes = np.ascontiguousarray(quarters[0].T).view(np.uint8).reshape(-1, 4)
    return codes[:rows, byte : byte + per_row]
