"""The shapes of the two launches of index selection, by the number of tokens."""

from dataclasses import dataclass

import torch

from dsv4.caches.rows import RowFormat
from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.constants import RowCode
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.token_share import WHOLE, TokenShare
from dsv4.ops.indexer.selection import Selection

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
# Top-k: one block is faster up to 16,384 visible entries, a cluster of 8 above.
_CLUSTER = 8
_SPREAD = 16384
# (threads, loads in a row) of a block that selects, which holds what they load in registers where
# that is all: in a decode step, and as one of many tokens.
# 1,024 threads have 64 registers each; two blocks of 256 threads share a multiprocessor.
_DECODE_BLOCK = (1024, 4)
_PREFILL_BLOCK = (256, 8)
# Entries that a warp of top_k keeps in shared memory after the first digit: 4 KiB a warp, so that
# 32 warps take 128 of the 227 KiB.
_KEPT = 512
# top_k.cuh: bins of a digit, sets of them that a cluster adds up, values ranked one by one.
_BINS = 2048
_SETS = 8
_FEW = 128


@dataclass(frozen=True)
class SelectionShapes:
    """How both kernels are launched for a number of tokens, which are those of a rank where ranks
    share them: the same for all layers that are alike. ``key_bytes``: of a value of a key.
    """

    blocks: int
    slots: int
    heads: int
    width: int
    key_code: RowCode
    key_bytes: int
    tensor_cores: bool
    by_warpgroups: bool
    share: TokenShare

    @classmethod
    def of(
        cls, recording: Recording, selection: Selection, share: TokenShare = WHOLE
    ) -> "SelectionShapes":
        """For a step of these operands."""
        _, heads, width = selection.q_TID.shape
        keys = selection.keys
        data = keys.data
        tensor_cores = (
            width == _WIDTH
            and heads % _HEAD_TILE == 0
            and heads <= _MOST_HEADS
            and data.dtype != torch.float32
            and is_aligned(selection.q_TID)
            and is_aligned(data)
        )
        by_warpgroups = (
            tensor_cores
            and recording.target.architecture == "sm_90a"
            and heads == _MANY_HEADS
            and keys.format is RowFormat.INDEX_FP8
        )
        return cls(
            recording.target.multiprocessors,
            keys.slots,
            heads,
            width,
            selection.key_code,
            data.element_size(),
            tensor_cores,
            by_warpgroups,
            share,
        )

    def decode_scores(self, tokens: int) -> Shape:
        """Few tokens: all blocks share the entries of each."""
        return self._scores(tokens, max(1, self.blocks // tokens), part_tiles=1)

    def prefill_scores(self, tokens: int) -> Shape:
        """Many tokens: a block takes all entries of one or, where that is faster, of eight, or a
        large share of them.
        """
        if self.by_warpgroups and tokens >= _FEWEST_OF_MANY:
            return self._many_scores(tokens)
        parts = max(1, 4 * self.blocks // tokens)
        return self._scores(tokens, parts, part_tiles=_SHARE_KEYS // _TILE_KEYS)

    def _many_scores(self, tokens: int) -> Shape:
        groups = ceil_div(tokens, _MANY_TOKENS)
        parts = max(1, 4 * self.blocks // groups)
        blocks = min(self.blocks, groups * parts)
        numbers = {"tokens": tokens, "max_parts": parts, "part_tiles": _MANY_PART_TILES}
        defines = (("SHARED_BYTES", _MANY_BYTES), *self.share.defines)
        kernel = Kernel("indexer/index_scores_sm90", "index_scores_sm90", defines)
        return Shape(kernel, blocks, _MANY_THREADS, _MANY_BYTES, numbers=numbers)

    def _scores(self, tokens: int, parts: int, part_tiles: int) -> Shape:
        threads = _WARP * _WARPS
        if not self.tensor_cores:
            kernel = Kernel(_SCORES, "index_scores_any_geometry", self.share.defines)
            grid = (max(1, 2 * self.blocks // tokens), tokens)
            numbers = {"heads": self.heads, "dim": self.width, "key_format": int(self.key_code)}
            return Shape(kernel, grid, threads, 4 * self.heads * (self.width + 1), numbers=numbers)
        nbytes = _tensor_core_bytes(self.heads, self.key_bytes)
        defines = (
            ("HEADS", self.heads),
            ("FP8", int(self.key_code is RowCode.INDEX_FP8)),
            ("SHARED_BYTES", nbytes),
            *self.share.defines,
        )
        kernel = Kernel(_SCORES, "index_scores", defines)
        blocks = min(self.blocks, tokens * parts)
        numbers = {"tokens": tokens, "max_parts": parts, "part_tiles": part_tiles}
        return Shape(kernel, blocks, threads, nbytes, numbers=numbers)

    def decode_top_k(self, tokens: int) -> Shape:
        """A cluster for each token that may see many entries."""
        cluster = _CLUSTER if self.slots > _SPREAD else 1
        return _top_k(tokens, cluster, _DECODE_BLOCK, WHOLE)

    def prefill_top_k(self, tokens: int) -> Shape:
        """A small block for each token."""
        return _top_k(tokens, 1, _PREFILL_BLOCK, self.share)


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
    merged = (_SETS * _BINS // cluster + _BINS) if cluster > 1 else _SETS + 1
    warps = threads // _WARP
    few = 3 * _FEW + 2 * cluster + 16
    return 4 * (2 * _BINS + merged + few + 2 * warps + 2 * warps * _KEPT)
