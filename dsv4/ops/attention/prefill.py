"""Attention of 9 and more tokens: a block, or unit of work, is some heads of one token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.attention.any_geometry import attention_any_geometry
from dsv4.ops.attention.inputs import AttentionInputs, check_alignment

# The longest list that is tested; the kernels know no limit.
_MOST_LISTED = 2048
_WARP = 32
# A warp takes a row at a time; 8 blocks of 8 warps fill a multiprocessor.
_DEQUANTIZE_THREADS = 256
# A multiprocessor holds so many blocks: 2048 threads.
_DEQUANTIZE_BLOCKS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True)
class _Form:
    """A kernel whose unit of work is ``heads`` heads of a token.

    ``key_rows``: rows of keys in shared memory. ``other_shared_bytes``: besides them and the
    queries (see its source). ``blocks``: of a multiprocessor, where they are persistent: they fill
    the GPU once and take units in turns.
    """

    name: str
    threads: int
    heads: int
    key_rows: int
    other_shared_bytes: int
    blocks: int | None = None

    def kernel(self, ring: RowCache) -> Kernel:
        return Kernel(f"attention/{self.name}", self.name, self.defines(ring))

    def defines(self, ring: RowCache) -> tuple[tuple[str, int], ...]:
        return (
            ("DIM", ring.width),
            ("ROPE", ring.rope_width),
            ("HEADS", self.heads),
            ("SHARED_BYTES", self.shared_bytes(ring.width)),
        )

    def shared_bytes(self, width: int) -> int:
        return (self.heads + self.key_rows) * 2 * width + self.other_shared_bytes


# Two tiles of keys. Other bytes: exchange, statistics, alignment.
_MMA = _Form("attention_prefill", 256, 64, 128, 16384 + 1664 + 1024)
_WGMMA = _Form("attention_prefill_sm90", 384, 64, 128, 24576 + 1024 + 1024, blocks=1)
# A stage of the ring is a column block of a tile, as large as eight rows: 11 and 9 of them. Other
# bytes: weights, statistics, alignment.
_FEW_HEADS = tuple(
    _Form("attention_prefill_few_sm90", 256, heads, rows, heads * 148 + 640 + 1024, blocks=2)
    for heads, rows in ((16, 88), (32, 72))
)


class _PlainRows(NamedTuple):
    """The caches as bfloat16 ``[slots, D]``."""

    ring_SD: Tensor
    compressed_CD: Tensor | None


def sparse_attention(
    recording: Recording,
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    """``dsv4.ops.attention.sparse_attention`` for bfloat16 q ``[T, H, D]``: bfloat16 ``[T, H, D]``.

    Caches KV_FP8 or PLAIN; ``selected_TK`` int64 or None, each entry complete for the last token of
    the step (s < (positions[-1] + 1) // ratio), −1 anywhere; sink float32 ``[H]``; positions int64,
    consecutive; inv_freq float32 ``[R/2]``. Any geometry; the fast kernels take D a multiple of 64
    up to 512 and R of 8 up to 64, fp8 or bfloat16 rows, and up to 2048 listed entries.

    On Hopper up to 32 heads, as a rank has them, take a form of their own.

    Fast kernels: products bfloat16 × bfloat16 with float32 sums; weights are rounded to bfloat16
    before the value product, the denominator is not. The result is rounded before and after the
    rotation. Same bits on every call. fp8 caches are dequantized into a bfloat16 copy first: 2·D
    bytes per slot of both caches. Raises ``ValueError`` for another dtype, shape or layout.
    """
    inputs = AttentionInputs.checked(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    if not _is_usual(inputs):
        return attention_any_geometry(recording, inputs)
    hopper = recording.target.architecture == "sm_90a"
    form = _hopper_form(q_THD.shape[1]) if hopper and keys.ring.width == 512 else _MMA
    return _by_matrix_products(recording, inputs, form)


def sparse_attention_portable(
    recording: Recording,
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    """``sparse_attention`` by the mma.sync kernel on GPUs that have wgmma too; ``ValueError`` where
    it does not fit.
    """
    inputs = AttentionInputs.checked(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    if not _is_usual(inputs):
        found = f"width {keys.ring.width} with {keys.ring.rope_width} rotary"
        raise ValueError(f"keys.ring: found {found}, expected 64·n up to 512 with 8·n up to 64")
    return _by_matrix_products(recording, inputs, _MMA)


def _hopper_form(heads: int) -> _Form:
    return next((form for form in _FEW_HEADS if heads <= form.heads), _WGMMA)


def _by_matrix_products(recording: Recording, inputs: AttentionInputs, form: _Form) -> Tensor:
    check_alignment(inputs.q_THD)
    if inputs.selected_TK is not None and inputs.listed == 0:
        inputs = inputs.without_entries()
    rows = _plain_rows(recording, inputs)
    keys = inputs.keys
    _, heads, width = inputs.q_THD.shape
    kernel = form.kernel(keys.ring)
    groups = ceil_div(heads, form.heads)
    most = None if form.blocks is None else form.blocks * recording.target.multiprocessors
    shape = by_tokens(_products_shape, kernel, groups, most, form.threads, form.shared_bytes(width))
    out_THD = recording.empty_like(inputs.q_THD)
    recording.launch(
        shape,
        q=inputs.q_THD,
        ring=rows.ring_SD,
        compressed=rows.compressed_CD,
        selected=inputs.selected_TK,
        sink=inputs.sink_H,
        positions=inputs.positions_T,
        inv_freq=inputs.inv_freq,
        out=out_THD,
        heads=heads,
        ring_slots=keys.ring.slots,
        compressed_slots=inputs.entries,
        listed=inputs.listed,
        ratio=max(keys.ratio, 1),
        window=keys.window,
        softmax_scale=width**-0.5,
    )
    return out_THD


def _products_shape(
    kernel: Kernel, groups: int, most: int | None, threads: int, shared_bytes: int, tokens: int
) -> Shape:
    """``most`` blocks, where they are persistent."""
    units = tokens * groups
    blocks = units if most is None else min(units, most)
    return Shape(kernel, blocks, threads, shared_bytes, numbers={"tokens": tokens})


def _dequantize_shape(
    kernel: Kernel, window: int, slots: int, entries: int, most_blocks: int, tokens: int
) -> Shape:
    rows = min(tokens + window, slots) + entries
    blocks = min(ceil_div(rows * _WARP, _DEQUANTIZE_THREADS), most_blocks)
    return Shape(kernel, blocks, _DEQUANTIZE_THREADS, numbers={"tokens": tokens})


def _plain_rows(recording: Recording, inputs: AttentionInputs) -> _PlainRows:
    """A bfloat16 copy of fp8 caches, slot by slot: the rows that these tokens can see."""
    ring = inputs.keys.ring
    compressed = inputs.keys.compressed
    if ring.format is RowFormat.PLAIN:
        return _PlainRows(ring.data, None if compressed is None else compressed.data)
    ring_SD = recording.empty((ring.slots, ring.width), torch.bfloat16)
    compressed_CD = None
    if compressed is not None:
        compressed_CD = recording.empty((compressed.slots, ring.width), torch.bfloat16)
    kernel = Kernel(f"attention/{_MMA.name}", "attention_prefill_dequantize", _MMA.defines(ring))
    window = inputs.keys.window
    entries = inputs.entries
    most_blocks = _DEQUANTIZE_BLOCKS_PER_MULTIPROCESSOR * recording.target.multiprocessors
    recording.launch(
        by_tokens(_dequantize_shape, kernel, window, ring.slots, entries, most_blocks),
        ring=ring.data,
        ring_scale=ring.block_scale,
        compressed=None if compressed is None else compressed.data,
        compressed_scale=None if compressed is None else compressed.block_scale,
        positions=inputs.positions_T,
        ring_out=ring_SD,
        compressed_out=compressed_CD,
        ring_slots=ring.slots,
        compressed_slots=entries,
        ratio=max(inputs.keys.ratio, 1),
        window=window,
    )
    return _PlainRows(ring_SD, compressed_CD)


def _is_usual(inputs: AttentionInputs) -> bool:
    """Whether the kernels of matrix products know these rows."""
    ring = inputs.keys.ring
    widths = ring.width % 64 == 0 and ring.width <= 512
    rotary = ring.rope_width % 8 == 0 and ring.rope_width <= 64
    # Codes are read 16 at a time.
    whole = ring.format is RowFormat.PLAIN or (ring.width - ring.rope_width) % 16 == 0
    short = inputs.listed <= _MOST_LISTED
    return widths and rotary and whole and short and ring.data.dtype != torch.float32
