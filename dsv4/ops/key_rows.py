"""Key rows as the kernels see them: the code of their format, and their layout in memory."""

import torch

from dsv4.caches.rows import RowCache, RowFormat, row_shapes
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.constants import RowCode

_QUANTISED = {
    RowFormat.KV_FP8: RowCode.KV_FP8,
    RowFormat.INDEX_FP8: RowCode.INDEX_FP8,
}
_PLAIN = {torch.bfloat16: RowCode.BF16, torch.float32: RowCode.F32}


def row_code(rows: RowCache, name: str = "rows") -> int:
    """The ``RowCode`` value of this cache. Raises ``ValueError`` for a dtype without one, which
    ``name`` has.
    """
    if rows.format in _QUANTISED:
        return _QUANTISED[rows.format].value
    if rows.data.dtype not in _PLAIN:
        expected = "torch.bfloat16 or torch.float32"
        raise ValueError(f"{name}: found plain rows of {rows.data.dtype}, expected {expected}")
    return _PLAIN[rows.data.dtype].value


def check_rows(name: str, rows: RowCache) -> None:
    """Raises ``ValueError`` unless the rows lie in memory as ``dsv4.caches.rows`` says."""
    row_code(rows, name)
    data, scale = row_shapes(rows.width, rows.rope_width, rows.format, rows.data.dtype)
    expect(name, rows.data, data[1], (rows.slots, data[0]))
    if scale is None:
        return
    if rows.block_scale is None:
        raise ValueError(f"{name}.block_scale: found None, expected {scale[1]}")
    expect(f"{name}.block_scale", rows.block_scale, scale[1], (rows.slots, scale[0]))


def check_key_rows(name: str, rows: RowCache) -> None:
    """``check_rows`` of rows that attention reads: not those of the indexer."""
    if rows.format is RowFormat.INDEX_FP8:
        raise ValueError(f"{name}: found index_fp8 rows, expected kv_fp8 or plain rows")
    check_rows(name, rows)


def in_vectors(rows: torch.Tensor, rope_width: int) -> bool:
    """Whether ``HeadRow`` of head_row.cuh takes rows ``[..., D]``: 16 bytes at a time.

    A warp holds a row in its registers, which end at 1024 values.
    """
    width = rows.shape[-1]
    return width % 8 == 0 and rope_width % 8 == 0 and width <= 1024 and is_aligned(rows)
