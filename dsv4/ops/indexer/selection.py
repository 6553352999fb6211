"""What decode and prefill share of index selection: checks, and the shapes of its two launches.

``index_scores`` writes the score of every entry that a token sees, as an integer that sorts like
it; ``top_k_tokens`` selects.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat, row_shapes
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect, expect_rows
from dsv4.launch.constants import RowCode
from dsv4.launch.items import ShapeOf
from dsv4.launch.kernel import Kernel, Shape, ceil_div, round_up
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.token_share import WHOLE, TokenShare
from dsv4.ops.indexer.query import check_queries

_SCORES = "indexer/index_scores"
_WARP = 32
# 8 warps of 255 registers are all that a multiprocessor holds: the queries take 128 of them.
_WARPS = 8
# index_scores.cu: width of a row, heads at once, keys of a tile, stages of a warp's ring.
_WIDTH = 128
_HEAD_TILE = 8
_TILE_KEYS = 16
_STAGES = 4
# Every thread keeps its part of the queries in registers: 128 of them for 64 heads.
_MOST_HEADS = 64
# Every block that takes a part of a token's keys rounds its queries again: parts of long steps
# have at least so many keys.
_SHARE_KEYS = 1024
# index_scores_sm90.cu: threads, tokens and heads of a block; tiles of 64 keys that make a part.
_MANY_THREADS = 512
_MANY_TOKENS = 8
_MANY_HEADS = 64
_MANY_PART_TILES = 8
# sizeof(Shared), from a 1024-byte border: queries, factors, visible entries.
_MANY_BYTES = _MANY_TOKENS * (_MANY_HEADS * (2 * _WIDTH + 4) + 4) + 1024
# From so many tokens on it is faster than the other form (docs/kernels/indexer.md).
_FEWEST_OF_MANY = 64
_ROW_CODES = {
    torch.uint8: RowCode.INDEX_FP8,
    torch.bfloat16: RowCode.BF16,
    torch.float32: RowCode.F32,
}
# Shared memory of a block on Hopper and Blackwell.
_MOST_SHARED_BYTES = 227 << 10
# Top-k: one block is faster up to 16,384 visible entries, a cluster of 8 above.
_CLUSTER = 8
_SPREAD = 16384
# (threads, loads in a row) of a block that selects: in a decode step, and as one of many tokens.
# 1,024 threads have 64 registers each; two blocks of 256 threads share a multiprocessor.
_DECODE_BLOCK = (1024, 4)
_PREFILL_BLOCK = (256, 8)
# Entries that a warp of top_k keeps in shared memory after the first digit: 4 KiB a warp, so that
# 32 warps take 128 of the 227 KiB.
_KEPT = 512
# top_k.cuh: bins of a digit, sets of them that a cluster adds up, values ranked one by one.
_BINS = 2048
_DIGITS = 7
_FEW = 128


@dataclass(frozen=True)
class Selection:
    """The arguments of ``index_select``, checked. ``selected``: the width K of the result."""

    q_TID: Tensor
    weight_TI: Tensor
    score_scale: float
    keys: RowCache
    positions_T: Tensor
    selected: int

    @property
    def score_stride(self) -> int:
        """Scores from one token to the next: 16 bytes are read at once."""
        return round_up(self.keys.slots, 4)

    def behind(self, first: int) -> "Selection":
        """The same of the tokens from this one on."""
        return Selection(
            self.q_TID[first:],
            self.weight_TI[first:],
            self.score_scale,
            self.keys,
            self.positions_T[first:],
            self.selected,
        )


def checked_selection(
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
) -> Selection:
    """Raises ``ValueError`` for a dtype, shape or layout that the kernels do not take."""
    check_queries(q_TID)
    tokens, heads, _ = q_TID.shape
    expect_rows("weight_TI", weight_TI, torch.float32, (tokens, heads))
    expect("positions_T", positions_T, torch.int64, (tokens,))
    _check_keys(keys, q_TID)
    if index_topk < 1:
        raise ValueError(f"index_topk: found {index_topk}, expected at least 1")
    selected = min(index_topk, keys.slots)
    return Selection(q_TID, weight_TI, score_scale, keys, positions_T, selected)


class SelectionShapes:
    """How both kernels are launched for a number of tokens, which are those of a rank where ranks
    share them.
    """

    def __init__(
        self, recording: Recording, selection: Selection, share: TokenShare = WHOLE
    ) -> None:
        self._share = share
        _, self._heads, width = selection.q_TID.shape
        self._blocks = recording.target.multiprocessors
        self._slots = selection.keys.slots
        data = selection.keys.data
        self.tensor_cores = (
            width == _WIDTH
            and self._heads % _HEAD_TILE == 0
            and self._heads <= _MOST_HEADS
            and data.dtype != torch.float32
            and is_aligned(selection.q_TID)
            and is_aligned(data)
        )
        if self.tensor_cores:
            self._score_bytes = _tensor_core_bytes(self._heads, data.element_size())
            defines = (
                ("HEADS", self._heads),
                ("FP8", int(selection.keys.format is RowFormat.INDEX_FP8)),
                ("SHARED_BYTES", self._score_bytes),
                *share.defines,
            )
            self._score_kernel = Kernel(_SCORES, "index_scores", defines)
            self._geometry: dict[str, int] = {}
        else:
            self._score_bytes = 4 * self._heads * (width + 1)
            self._score_kernel = Kernel(_SCORES, "index_scores_any_geometry", share.defines)
            code = int(_ROW_CODES[data.dtype])
            self._geometry = {"heads": self._heads, "dim": width, "key_format": code}
        self._by_warpgroups = (
            self.tensor_cores
            and recording.target.architecture == "sm_90a"
            and self._heads == _MANY_HEADS
            and selection.keys.format is RowFormat.INDEX_FP8
        )

    def decode_scores(self, tokens: int) -> Shape:
        """Few tokens: all blocks share the entries of each."""
        return self._scores(tokens, max(1, self._blocks // tokens), part_tiles=1)

    def prefill_scores(self, tokens: int) -> Shape:
        """Many tokens: a block takes all entries of one or, where that is faster, of eight, or a
        large share of them.
        """
        if self._by_warpgroups and tokens >= _FEWEST_OF_MANY:
            return self._many_scores(tokens)
        parts = max(1, 4 * self._blocks // tokens)
        return self._scores(tokens, parts, part_tiles=_SHARE_KEYS // _TILE_KEYS)

    def _many_scores(self, tokens: int) -> Shape:
        groups = ceil_div(tokens, _MANY_TOKENS)
        parts = max(1, 4 * self._blocks // groups)
        blocks = min(self._blocks, groups * parts)
        numbers = {"tokens": tokens, "max_parts": parts, "part_tiles": _MANY_PART_TILES}
        defines = (("SHARED_BYTES", _MANY_BYTES), *self._share.defines)
        kernel = Kernel("indexer/index_scores_sm90", "index_scores_sm90", defines)
        return Shape(kernel, blocks, _MANY_THREADS, _MANY_BYTES, numbers=numbers)

    def _scores(self, tokens: int, parts: int, part_tiles: int) -> Shape:
        kernel = self._score_kernel
        nbytes = self._score_bytes
        if not self.tensor_cores:
            grid = (max(1, 2 * self._blocks // tokens), tokens)
            return Shape(kernel, grid, _WARP * _WARPS, nbytes, numbers=self._geometry)
        blocks = min(self._blocks, tokens * parts)
        numbers = {"tokens": tokens, "max_parts": parts, "part_tiles": part_tiles}
        return Shape(kernel, blocks, _WARP * _WARPS, nbytes, numbers=numbers)

    def decode_top_k(self, tokens: int) -> Shape:
        """A cluster for each token that may see many entries."""
        if self._slots > _SPREAD:
            return _top_k(tokens, _CLUSTER, _DECODE_BLOCK, WHOLE)
        return _top_k(tokens, 1, _DECODE_BLOCK, WHOLE)

    def prefill_top_k(self, tokens: int) -> Shape:
        """A small block for each token."""
        return _top_k(tokens, 1, _PREFILL_BLOCK, self._share)


def record_selection(
    recording: Recording,
    selection: Selection,
    shapes: tuple[Shape | ShapeOf, Shape | ShapeOf],
    score_TS: Tensor,
    selected_TK: Tensor,
    peers: Tensor | None = None,
    first_token: int = 0,
) -> None:
    """Both launches. ``shapes``: of index_scores and top_k; scores are int32 ``[T, stride]``.
    ``peers``: where the lists go too (``Peers.table_P``), the first being that of number
    ``first_token``.
    """
    keys = selection.keys
    recording.launch(
        shapes[0],
        q=selection.q_TID,
        weights=selection.weight_TI,
        score_scale=float(selection.score_scale),
        data=keys.data,
        scales=keys.block_scale,
        positions=selection.positions_T,
        scores=score_TS,
        nan=recording.nan_1,
        slots=keys.slots,
        score_stride=selection.score_stride,
        weight_stride=selection.weight_TI.stride(0),
        selected=selection.selected,
    )
    recording.serve_choice(None)
    recording.launch(
        shapes[1],
        orders=score_TS,
        positions=selection.positions_T,
        out=selected_TK,
        slots=keys.slots,
        stride=selection.score_stride,
        selected=selection.selected,
        peers=peers,
        first_token=first_token,
    )
    recording.serve_choice(None)


def _top_k(tokens: int, cluster: int, block: tuple[int, int], share: TokenShare) -> Shape:
    threads, strips = block
    nbytes = _top_k_bytes(cluster, threads)
    defines = (
        ("CLUSTER", cluster),
        ("THREADS", threads),
        ("STRIPS", strips),
        ("KEPT", _KEPT),
        ("SPREAD", _SPREAD),
        ("SHARED_BYTES", nbytes),
        *share.sender_defines,
    )
    kernel = Kernel("indexer/top_k", "top_k_tokens", defines)
    return Shape(kernel, cluster * tokens, threads, nbytes, cluster)


def _tensor_core_bytes(heads: int, key_bytes: int) -> int:
    """``sizeof(Shared)`` of index_scores.cu, which asserts it.

    Queries twice, factors, and the warps' rings of keys and scales.
    """
    ring = _WARPS * _STAGES * _TILE_KEYS * (_WIDTH * key_bytes + 4)
    return 2 * 2 * heads * _WIDTH + 4 * heads + ring


def _top_k_bytes(cluster: int, threads: int) -> int:
    """At least ``sizeof(Shared)`` of top_k.cuh, which top_k.cu asserts."""
    merged = (_DIGITS * _BINS // cluster + _BINS) if cluster > 1 else _DIGITS + 1
    warps = threads // _WARP
    return 4 * (2 * _BINS + merged + 3 * _FEW + 2 * warps + 16 + 2 * warps * _KEPT)


def _check_keys(keys: RowCache, q_TID: Tensor) -> None:
    heads, width = q_TID.shape[1:]
    if keys.format is RowFormat.KV_FP8 or keys.width != width:
        found = f"{keys.format.value} rows of {keys.width}"
        raise ValueError(f"keys: found {found}, expected index_fp8 or plain rows of {width}")
    if keys.data.dtype not in _ROW_CODES:
        found = keys.data.dtype
        raise ValueError(f"keys: found {found}, expected torch.bfloat16 or torch.float32")
    if 4 * heads * (width + 1) > _MOST_SHARED_BYTES:
        expected = f"at most {_MOST_SHARED_BYTES // 4} values"
        raise ValueError(f"q_TID: found {heads} heads of {width}, expected {expected}")
    data, scale = row_shapes(keys.width, keys.rope_width, keys.format, keys.data.dtype)
    expect("keys", keys.data, data[1], (keys.slots, data[0]))
    if scale is not None and keys.block_scale is not None:
        expect("keys.block_scale", keys.block_scale, scale[1], (keys.slots, scale[0]))
