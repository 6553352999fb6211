"""The grouped products of many tokens: (token, slot) pairs sorted by expert, and two GEMMs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape, ceil_div, round_up
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.prefill import (
    FEW,
    MODE_DOWN,
    MODE_GATE_UP,
    NARROW,
    SOME,
    TILE_TOKENS,
    WIDE,
    Build,
    Tile,
    build_for,
    matrix_arguments,
)
from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded

# The mode of an entry of prefill_gemm.cuh.
_MODES = {"prefill_gate_up": MODE_GATE_UP, "prefill_down": MODE_DOWN}
_TILES = (FEW, SOME, NARROW, WIDE)
# Pairs of an expert on average up to which tiles are small (docs/kernels/moe.md).
_FEW_PAIRS = 16
_SOME_PAIRS = 48
# Threads and warps of moe_sort.cu.
_SORT_THREADS = 1024
_SORT_WARPS = 32
# bfloat16 values in 16 bytes, which rows that a GEMM reads begin at multiples of.
_VECTOR = 8


@dataclass(frozen=True)
class Sorted:
    """Pairs (token, slot) in expert order: ``slots`` int32 ``[T·P]`` holds token · P + slot.

    ``tiles`` int32 ``[most, 4]`` {expert, first position, pairs, 0}, of which ``tile_count`` int32
    ``[1]`` are in use.
    """

    slots: Tensor
    tiles: Tensor
    tile_count: Tensor
    cut: "Cut"

    @property
    def per_token(self) -> int:
        """P."""
        return self.cut.per_token

    @property
    def experts(self) -> int:
        """X."""
        return self.cut.experts

    def tiling(self, tokens: int) -> "Tiling":
        """The tiling of the pairs of ``tokens``."""
        return self.cut.tiling(tokens)


class Cut(NamedTuple):
    """How pairs are cut into tiles, P of every token over X experts: of at most 128 pairs, or
    ``finely``, into small ones where an expert has few on average.
    """

    per_token: int
    experts: int
    finely: bool = False

    def tiling(self, tokens: int) -> "Tiling":
        """The tiling of the pairs of ``tokens``; an expert's pairs share no tile with others."""
        pairs = tokens * self.per_token
        average = ceil_div(pairs, self.experts)
        tile = Tiling.of_tokens(average).tile
        if self.finely and average <= _SOME_PAIRS:
            tile = FEW if average <= _FEW_PAIRS else SOME
        return Tiling(pairs // tile.tokens + min(self.experts, pairs), tile)

    def most_tiles(self, tokens: int) -> int:
        """Those of any number up to ``tokens``: more of them can be cut into fewer tiles."""
        small = (pairs * self.experts // self.per_token for pairs in (_FEW_PAIRS, _SOME_PAIRS))
        return max(self.tiling(min(count, tokens)).most for count in (*small, tokens))


class Tiling(NamedTuple):
    """How rows are cut into tiles: ``most`` of them can result."""

    most: int
    tile: Tile

    @classmethod
    def of_tokens(cls, tokens: int) -> "Tiling":
        """The tiling of all tokens in their order."""
        tile = WIDE if tokens > TILE_TOKENS // 2 else NARROW
        return cls(ceil_div(tokens, tile.tokens), tile)


def sort_by_expert(
    recording: Recording, ids_TP: Tensor, experts: int, finely: bool = False
) -> Sorted:
    """The stable order of ids int64 ``[T, P]`` by expert, in tiles of pairs of one (``Cut``)."""
    tokens, per_token = ids_TP.shape
    cut = Cut(per_token, experts, finely)
    most = cut.most_tiles(tokens)
    slots = recording.empty((tokens * per_token,), torch.int32)
    tiles = recording.empty((most, 4), torch.int32)
    tile_count = recording.empty((1,), torch.int32)
    recording.launch(
        by_tokens(_sort_shape, cut),
        ids=ids_TP,
        slots=slots,
        tiles=tiles,
        tile_count=tile_count,
        experts=experts,
    )
    return Sorted(slots, tiles, tile_count, cut)


def _sort_shape(cut: Cut, tokens: int) -> Shape:
    pairs = tokens * cut.per_token
    shared_bytes = sort_shared_bytes(pairs, cut.experts)
    kernel = Kernel("moe/moe_sort", "moe_sort")
    numbers = {"count": pairs, "tile": cut.tiling(tokens).tile.tokens}
    return Shape(kernel, 1, _SORT_THREADS, shared_bytes, numbers=numbers)


def sort_shared_bytes(pairs: int, experts: int) -> int:
    """Dynamic shared memory of the sort: tables of experts, and two 16-bit values per pair."""
    return 4 * (experts + 1) * (_SORT_WARPS + 2) + 4 * pairs


def gate_up(
    recording: Recording,
    x_TE: Tensor,
    w1: PackedWeight,
    w3: PackedWeight,
    limit: float,
    pairs: Sorted | None = None,
    weights_TP: Tensor | None = None,
) -> Tensor:
    """round(weight · silu(min(g, limit)) · clamp(u, ±limit)), g = w1 · x, u = w3 · x: bfloat16.

    With ``pairs``: one row per pair in sorted order, experts w1, w3 ``[X, F, E]``, routing weights
    float32 ``[T, P]``. Without: one row per token, w1, w3 ``[F, E]``, weight 1. Rows are ``[F]``
    and begin at multiples of 16 bytes.
    """
    rows, columns = w1.shape[-2:]
    per_token = 1 if pairs is None else pairs.per_token
    stride = round_up(rows, _VECTOR)
    hidden = recording.empty((x_TE.shape[0] * per_token, stride), torch.bfloat16)
    product = _Product.of(recording, "prefill_gate_up", w1)
    recording.launch(
        by_tokens(_gate_up_shape, product, None if pairs is None else pairs.cut),
        x=x_TE,
        **matrix_arguments(w1, "w1"),
        **matrix_arguments(w3, "w3"),
        tiles=None if pairs is None else pairs.tiles,
        tile_count=None if pairs is None else pairs.tile_count,
        slots=None if pairs is None else pairs.slots,
        routing=weights_TP,
        h=hidden,
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
        x_stride=x_TE.stride(0),
        h_stride=stride,
        per_token=per_token,
        limit=limit,
    )
    return hidden[:, :rows]


def down(recording: Recording, hidden: Tensor, w2: PackedWeight, pairs: Sorted) -> Tensor:
    """w2[expert] · hidden of every pair: float32 ``[T·P, E]`` in the order of ids.

    Rows of ids that are no expert are not written.
    """
    rows, columns = w2.shape[-2:]
    products = recording.empty((hidden.shape[0], rows), torch.float32)
    product = _Product.of(recording, "prefill_down", w2)
    recording.launch(
        by_tokens(_down_shape, product, pairs.cut),
        h=hidden,
        **matrix_arguments(w2, "w2"),
        tiles=pairs.tiles,
        tile_count=pairs.tile_count,
        slots=pairs.slots,
        y=products,
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
        h_stride=hidden.stride(0),
    )
    return products


@dataclass(frozen=True)
class _Product:
    """An entry of prefill_gemm.cuh for a weight of so many rows: its builds in the order of
    ``_TILES``.
    """

    function: str
    builds: tuple[Build, ...]
    rows: int
    multiprocessors: int

    @classmethod
    def of(cls, recording: Recording, function: str, weight: PackedWeight) -> "_Product":
        mode = _MODES[function]
        rows = weight.shape[-2]
        target = recording.target
        fitting = (tile.fitting(mode, rows) for tile in _TILES)
        builds = tuple(
            build_for(weight.format, mode, target.architecture, tile=tile) for tile in fitting
        )
        return cls(function, builds, rows, target.multiprocessors)

    def shape(self, tiling: Tiling, **numbers: int) -> Shape:
        """Persistent blocks, as many as there may be tiles and multiprocessors."""
        build = self.builds[_TILES.index(tiling.tile)]
        blocks = min(tiling.most * ceil_div(self.rows, build.rows), self.multiprocessors)
        return build.shape(self.function, blocks, **numbers)


def _gate_up_shape(product: _Product, cut: Cut | None, tokens: int) -> Shape:
    """``cut`` None: of all tokens in their order."""
    tiling = Tiling.of_tokens(tokens) if cut is None else cut.tiling(tokens)
    return product.shape(tiling, tokens=tokens)


def _down_shape(product: _Product, cut: Cut, tokens: int) -> Shape:
    return product.shape(cut.tiling(tokens))
