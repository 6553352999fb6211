"""Everything between a layer's projections and its attention for 1 to 8 tokens: one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO
from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import byte_offset, is_aligned, storage_key
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.compressor.decode import compress
from dsv4.ops.compressor.windows import THREADS, Windows, check_windows, split
from dsv4.ops.hyper_connection.left_comb import left_comb
from dsv4.ops.indexer.query import LOAD_BYTES, check_index_queries, index_query
from dsv4.ops.key_rows import in_vectors, row_code
from dsv4.ops.kv_write.decode import kv_write
from dsv4.ops.kv_write.rows import KeyRows
from dsv4.ops.kv_write.rows import check as check_key_rows
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.rope.cuda import DECODE_ROWS_PER_BLOCK, WARP, check_queries, query_rope

# Warps of a block that take one row each. No record compares other numbers. 8 keep a block without
# a compressor at 256 threads, and the 65 or more rows of a token spread over blocks.
_ROW_WARPS = 8


class _Step(NamedTuple):
    """The arguments of ``prepare_attention``."""

    queries: Queries
    kv_TD: Tensor
    positions_T: Tensor
    norm: QueryKeyNorm
    ring: RowCache
    compressions: tuple[Compression, ...]

    @property
    def key_rows(self) -> KeyRows:
        norm = self.norm
        return KeyRows(
            self.kv_TD, norm.kv_norm, self.positions_T, norm.inv_freq, self.ring, norm.eps
        )

    @property
    def main(self) -> Compression | None:
        """The main compressor's part."""
        return self.compressions[0] if self.compressions else None

    @property
    def index(self) -> Compression | None:
        """The indexer's compressor's part."""
        return self.compressions[1] if len(self.compressions) > 1 else None


def prepare_attention(
    recording: Recording,
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Queries:
    """``dsv4.ops.prepare_attention.prepare_attention`` in bfloat16: one launch in the formats of a
    model, else the launches of its parts, one after the other; the same bits either way.

    Raises ``ValueError`` for another dtype, shape or layout, and for more than 8 tokens.
    """
    step = _Step(queries, kv_TD, positions_T, norm, ring, compressions)
    _check(step)
    return _one_launch(recording, step) if _is_usual(step) else _in_parts(recording, step)


def _in_parts(recording: Recording, step: _Step) -> Queries:
    q_THD, index_TID = step.queries
    norm = step.norm
    positions_T = step.positions_T
    rows = DECODE_ROWS_PER_BLOCK
    rotated_THD = query_rope(recording, q_THD, positions_T, norm.inv_freq, norm.eps, rows)
    kv_write(recording, *step.key_rows)
    for part in step.compressions:
        compress(recording, part.kv_TW, part.score_TW, positions_T, part.weights, part.state)
    if index_TID is None:
        return Queries(rotated_THD, None)
    return Queries(rotated_THD, index_query(recording, index_TID, positions_T, norm.inv_freq))


def _one_launch(recording: Recording, step: _Step) -> Queries:
    q_THD, index_TID = step.queries
    norm = step.norm
    ring = step.ring
    tokens, heads, _ = q_THD.shape
    index_heads, index_width = (0, 1) if index_TID is None else index_TID.shape[1:]
    rotated_THD = recording.empty_like(q_THD)
    rotated_TID = None if index_TID is None else recording.empty_like(index_TID)
    main = step.main
    window_blocks = 0 if main is None else split(main.weights, main.state.rows).blocks
    cluster = max(1, window_blocks)
    streams, seam = left_comb(recording)

    def shape(rows: int) -> Shape:
        row_blocks = ceil_div(rows + (streams > 0), _ROW_WARPS)
        blocks = window_blocks + (step.index is not None) + row_blocks
        defines = (*_defines(step), ("STREAMS", streams))
        return Shape(
            Kernel("prepare_attention/prepare_attention", "prepare_attention", defines),
            (round_up(blocks, cluster), tokens),
            THREADS if step.compressions else WARP * _ROW_WARPS,
            cluster=cluster,
        )

    recording.launch(
        shape(1 + heads + index_heads),
        positions=step.positions_T,
        inv_freq=norm.inv_freq,
        q=q_THD,
        q_out=rotated_THD,
        heads=heads,
        index_q=index_TID,
        index_q_out=rotated_TID,
        index_heads=index_heads,
        kv=step.kv_TD,
        kv_norm=norm.kv_norm,
        ring_data=ring.data,
        ring_scale=ring.block_scale,
        ring_slots=ring.slots,
        **_compressor_arguments("main", step.main),
        **_compressor_arguments("keys", step.index),
        eps=norm.eps,
        index_normaliser=index_width**-0.5,
        **seam,
    )
    if index_TID is not None:
        recording.serve_choice(shape(1 + heads))
    return Queries(rotated_THD, rotated_TID)


def _compressor_arguments(
    prefix: str, compression: Compression | None
) -> dict[str, Tensor | int | None]:
    """Arguments of the compressor that the kernel calls ``prefix``; null without one."""
    if compression is None:
        tensors = ("kv", "score", "ape", "norm", "ring_kv", "ring_score", "data", "scale")
        absent = {f"{prefix}_{name}": None for name in tensors}
        return {**absent, f"{prefix}_row_slots": 0, f"{prefix}_ring_slots": 0}
    weights = compression.weights
    state = compression.state
    return {
        f"{prefix}_kv": compression.kv_TW,
        f"{prefix}_score": compression.score_TW,
        f"{prefix}_ape": weights.ape,
        f"{prefix}_norm": weights.norm,
        f"{prefix}_ring_kv": state.ring.kv,
        f"{prefix}_ring_score": state.ring.score,
        f"{prefix}_data": state.rows.data,
        f"{prefix}_scale": state.rows.block_scale,
        f"{prefix}_row_slots": state.rows.slots,
        f"{prefix}_ring_slots": state.ring.kv.shape[0],
    }


def _defines(step: _Step) -> Defines:
    """The geometry and the formats of a layer."""
    ratio = 0
    blocks = 1
    groups = 1
    index_width = 0
    index_format = 0
    index_groups = 1
    if step.main is not None:
        weights = step.main.weights
        rows = step.main.state.rows
        ratio = weights.ratio
        blocks, groups = split(weights, rows)
    if step.index is not None:
        rows = step.index.state.rows
        index_width = rows.width
        index_format = row_code(rows)
        _, index_groups = split(step.index.weights, rows)
    return (
        ("WIDTH", step.ring.width),
        ("ROPE", 2 * step.norm.inv_freq.shape[0]),
        ("KEY_FORMAT", row_code(step.ring)),
        ("RATIO", ratio),
        ("BLOCKS", blocks),
        ("GROUPS", groups),
        ("INDEX_WIDTH", index_width),
        ("INDEX_FORMAT", index_format),
        ("INDEX_GROUPS", index_groups),
        ("ROW_WARPS", _ROW_WARPS),
    )


def _is_usual(step: _Step) -> bool:
    """Whether the kernel knows this geometry: rows in vectors, all in the layer's formats."""
    q_THD, index_TID = step.queries
    compressions = step.compressions
    if not in_vectors(q_THD, 2 * step.norm.inv_freq.shape[0]) or not step.key_rows.in_vectors:
        return False
    if q_THD.shape[-1] != step.ring.width or len(compressions) > 2:
        return False
    if (index_TID is not None) != (len(compressions) == 2):
        return False
    if index_TID is not None and not is_aligned(index_TID, LOAD_BYTES):
        return False
    return all(
        _is_usual_part(compression, step, index_TID if number else None)
        for number, compression in enumerate(compressions)
    )


def _is_usual_part(compression: Compression, step: _Step, index_TID: Tensor | None) -> bool:
    """The main compressor pools rows like the ring's, the indexer's rows like its queries."""
    weights = compression.weights
    rows = compression.state.rows
    if not compression.kv_TW.is_contiguous() or not compression.score_TW.is_contiguous():
        return False
    same_table = _is_same_memory(weights.inv_freq, step.norm.inv_freq)
    if not same_table or weights.norm_eps != step.norm.eps:
        return False
    if weights.compute_dtype != torch.bfloat16 or weights.rotate_keys != (index_TID is not None):
        return False
    if index_TID is not None:
        return weights.ratio == CSA_RATIO and rows.width == index_TID.shape[-1]
    ring = step.ring
    same_format = rows.format is ring.format and rows.data.dtype == ring.data.dtype
    return same_format and rows.width == ring.width


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return storage_key(one) == storage_key(other) and byte_offset(one) == byte_offset(other)


def _check(step: _Step) -> None:
    q_THD, index_TID = step.queries
    positions_T = step.positions_T
    if q_THD.shape[0] > MAX_DECODE_TOKENS:
        found = f"{q_THD.shape[0]} tokens"
        raise ValueError(f"q_THD: found {found}, expected at most {MAX_DECODE_TOKENS}")
    check_queries(q_THD, positions_T, step.norm.inv_freq)
    check_key_rows(step.key_rows)
    for part in step.compressions:
        check_windows(Windows(part.kv_TW, part.score_TW, positions_T, part.weights, part.state))
    if index_TID is not None:
        check_index_queries(index_TID, positions_T, step.norm.inv_freq)
