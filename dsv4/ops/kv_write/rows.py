"""The arguments of ``kv_write`` as one value, what its kernels ask of them, and the kernels of one
block per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.rows import KV_GROUP, RowCache, RowFormat
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.key_rows import check_key_rows, in_vectors, row_code

# A thread takes values of one row in steps of the block. No record compares other numbers.
_THREADS = 256
# A block keeps its row in static shared memory.
_WIDEST_ROW = 4096


class KeyRows(NamedTuple):
    """See ``dsv4.ops.kv_write.kv_write``."""

    kv_TD: Tensor
    norm_weight: Tensor
    positions_T: Tensor
    inv_freq: Tensor
    ring: RowCache
    eps: float

    @property
    def in_vectors(self) -> bool:
        """Whether a warp can keep a row in registers (head_row.cuh) and store it in the ring."""
        ring = self.ring
        grouped = ring.format is RowFormat.PLAIN or (ring.width - ring.rope_width) % KV_GROUP == 0
        aligned = is_aligned(self.norm_weight) and is_aligned(ring.data)
        return grouped and aligned and in_vectors(self.kv_TD, ring.rope_width)


def check(rows: KeyRows) -> None:
    """Raises ``ValueError`` unless ``kv_write`` takes these."""
    kv_TD = rows.kv_TD
    ring = rows.ring
    if kv_TD.dim() != 2 or kv_TD.shape[1] != ring.width or ring.width > _WIDEST_ROW:
        expected = f"[T, {ring.width}], at most {_WIDEST_ROW} wide"
        raise ValueError(f"kv_TD: found {list(kv_TD.shape)}, expected {expected}")
    tokens, width = kv_TD.shape
    if tokens > ring.slots:
        expected = f"at most the ring's {ring.slots}"
        raise ValueError(f"kv_TD: found {tokens} tokens, expected {expected}")
    expect("kv_TD", kv_TD, torch.bfloat16, (tokens, width))
    expect("norm_weight", rows.norm_weight, torch.float32, (width,))
    expect("positions_T", rows.positions_T, torch.int64, (tokens,))
    expect("inv_freq", rows.inv_freq, torch.float32, (ring.rope_width // 2,))
    check_key_rows("ring", ring)


def write_by_blocks(recording: Recording, rows: KeyRows, function: str) -> None:
    """Records ``function`` of kv_write.cu, which has a block for every token."""
    ring = rows.ring
    kernel = Kernel("kv_write/kv_write", function)
    recording.launch(
        by_tokens(_shape, kernel),
        kv=rows.kv_TD,
        norm_weight=rows.norm_weight,
        positions=rows.positions_T,
        inv_freq=rows.inv_freq,
        data=ring.data,
        scale=ring.block_scale,
        format=row_code(ring),
        width=ring.width,
        rope_width=ring.rope_width,
        slots=ring.slots,
        eps=rows.eps,
    )


def _shape(kernel: Kernel, tokens: int) -> Shape:
    return Shape(kernel, tokens, _THREADS)
