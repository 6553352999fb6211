"""The grouped products of many tokens: (token, slot) pairs sorted by expert, and two GEMMs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape, ceil_div, round_up
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.prefill import (
    MODE_DOWN,
    MODE_GATE_UP,
    TILE_TOKENS,
    Build,
    build_for,
    matrix_arguments,
)
from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded

# Per entry of prefill_gemm.cuh: its mode, and the weight rows of one tile (ROWS_PER_BLOCK).
_MODE_AND_ROWS = {"prefill_gate_up": (MODE_GATE_UP, 128), "prefill_down": (MODE_DOWN, 256)}
# Threads and warps of moe_sort.cu.
_SORT_THREADS = 1024
_SORT_WARPS = 32
# bfloat16 values in 16 bytes, which rows that a GEMM reads begin at multiples of.
_VECTOR = 8


@dataclass(frozen=True)
class Sorted:
    """Pairs (token, slot) in expert order: ``slots`` int32 ``[T·P]`` holds token · P + slot.

    ``tiles`` int32 ``[most, 4]`` {expert, first position, pairs, 0}, of which ``tile_count`` int32
    ``[1]`` are in use. ``per_token`` is P, ``experts`` X.
    """

    slots: Tensor
    tiles: Tensor
    tile_count: Tensor
    per_token: int
    experts: int

    def tiling(self, tokens: int) -> "Tiling":
        """The tiling of the pairs of ``tokens``; an expert's pairs share no tile with others."""
        return Tiling.of_pairs(tokens * self.per_token, self.experts)


class Tiling(NamedTuple):
    """How rows are cut into tiles of at most ``TILE_TOKENS``: ``most`` tiles can result.

    ``wide``: the average tile holds more than half of that.
    """

    most: int
    wide: bool

    @classmethod
    def of_pairs(cls, pairs: int, experts: int) -> "Tiling":
        """The tiling of pairs; an expert's pairs share no tile with others."""
        most = pairs // TILE_TOKENS + min(experts, pairs)
        return cls(most, pairs > TILE_TOKENS // 2 * experts)

    @classmethod
    def of_tokens(cls, tokens: int) -> "Tiling":
        """The tiling of all tokens in their order."""
        return cls(ceil_div(tokens, TILE_TOKENS), tokens > TILE_TOKENS // 2)


def sort_by_expert(recording: Recording, ids_TP: Tensor, experts: int) -> Sorted:
    """The stable order of ids int64 ``[T, P]`` by expert, in tiles of at most 128 pairs of one."""
    tokens, per_token = ids_TP.shape
    most = Tiling.of_pairs(tokens * per_token, experts).most
    slots = recording.empty((tokens * per_token,), torch.int32)
    tiles = recording.empty((most, 4), torch.int32)
    tile_count = recording.empty((1,), torch.int32)
    recording.launch(
        by_tokens(_sort_shape, per_token, experts),
        ids=ids_TP,
        slots=slots,
        tiles=tiles,
        tile_count=tile_count,
        experts=experts,
    )
    return Sorted(slots, tiles, tile_count, per_token, experts)


def _sort_shape(per_token: int, experts: int, tokens: int) -> Shape:
    pairs = tokens * per_token
    shared_bytes = sort_shared_bytes(pairs, experts)
    kernel = Kernel("moe/moe_sort", "moe_sort")
    return Shape(kernel, 1, _SORT_THREADS, shared_bytes, numbers={"count": pairs})


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
    experts = None if pairs is None else pairs.experts
    product = _Product.of(recording, "prefill_gate_up", w1)
    recording.launch(
        by_tokens(_gate_up_shape, product, per_token, experts),
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
        by_tokens(_down_shape, product, pairs.per_token, pairs.experts),
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
    """An entry of prefill_gemm.cuh for a weight: its builds for narrow and wide tiles."""

    function: str
    builds: tuple[Build, Build]
    row_blocks: int
    multiprocessors: int

    @classmethod
    def of(cls, recording: Recording, function: str, weight: PackedWeight) -> "_Product":
        mode, tile_rows = _MODE_AND_ROWS[function]
        target = recording.target
        narrow, wide = (
            build_for(weight.format, mode, target.architecture, wide=wide) for wide in (False, True)
        )
        row_blocks = ceil_div(weight.shape[-2], tile_rows)
        return cls(function, (narrow, wide), row_blocks, target.multiprocessors)

    def shape(self, tiling: Tiling, **numbers: int) -> Shape:
        """Persistent blocks, as many as there may be tiles and multiprocessors."""
        blocks = min(tiling.most * self.row_blocks, self.multiprocessors)
        return self.builds[tiling.wide].shape(self.function, blocks, **numbers)


def _gate_up_shape(product: _Product, per_token: int, experts: int | None, tokens: int) -> Shape:
    """``experts`` None: of all tokens in their order."""
    if experts is None:
        return product.shape(Tiling.of_tokens(tokens), tokens=tokens)
    return product.shape(Tiling.of_pairs(tokens * per_token, experts), tokens=tokens)


def _down_shape(product: _Product, per_token: int, experts: int, tokens: int) -> Shape:
    return product.shape(Tiling.of_pairs(tokens * per_token, experts))
