"""The grouped products of many tokens: two GEMMs of (token, slot) pairs sorted by expert."""

import torch
from torch import Tensor

from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.aligned import empty_rows
from dsv4.ops.linear.prefill import (
    FEW,
    MODE_DOWN,
    MODE_GATE_UP,
    NARROW,
    NO_SPLITS,
    SOME,
    WIDE,
    Split,
    build_for,
    matrix_arguments,
)
from dsv4.ops.linear.prefill_long import takes_boxes
from dsv4.ops.moe.grouped_long import long_down, long_gate_up
from dsv4.ops.moe.sorted_pairs import NO_PAIRS, Cut, Sorted, Tiling, sort_by_expert
from dsv4.ops.moe.tiled_product import TiledProduct
from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded

# The mode of an entry of prefill_gemm.cuh.
_MODES = {"prefill_gate_up": MODE_GATE_UP, "prefill_down": MODE_DOWN}
_TILES = (FEW, SOME, NARROW, WIDE)


def sort_pairs(recording: Recording, x_TE: Tensor, ids_TP: Tensor, experts: int) -> Sorted:
    """``sort_by_expert`` in the tiles with which the products of x are fastest."""
    coarsely = takes_boxes(recording, x_TE)
    return sort_by_expert(recording, ids_TP, experts, finely=True, coarsely=coarsely)


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
    hidden = empty_rows(recording, (x_TE.shape[0] * per_token, rows), torch.bfloat16)
    boxes = takes_boxes(recording, x_TE)
    if boxes and pairs is not None:
        long_gate_up(recording, x_TE, (w1, w3), limit, hidden, pairs, weights_TP)
        return hidden
    product = _product(recording, "prefill_gate_up", w1)
    split = Split.of(recording.target, MODE_GATE_UP, rows, columns)
    some_long = boxes and recording.tokens >= split.long_from
    recording.launch(
        by_tokens(_gate_up_shape, product, split if pairs is None else pairs.cut, some_long),
        x=x_TE,
        **matrix_arguments(w1, "w1"),
        **matrix_arguments(w3, "w3"),
        **(NO_PAIRS if pairs is None else pairs.arguments),
        routing=weights_TP,
        h=hidden,
        **(split.memory(recording) if pairs is None else NO_SPLITS),
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
        x_stride=x_TE.stride(0),
        h_stride=hidden.stride(0),
        per_token=per_token,
        limit=limit,
    )
    if some_long:
        long_gate_up(recording, x_TE, (w1, w3), limit, hidden, split, None)
    return hidden


def down(recording: Recording, hidden: Tensor, w2: PackedWeight, pairs: Sorted) -> Tensor:
    """w2[expert] · hidden of every pair: float32 ``[T·P, E]`` in the order of ids.

    Rows of ids that are no expert are not written.
    """
    rows, columns = w2.shape[-2:]
    products = recording.empty((hidden.shape[0], rows), torch.float32)
    if takes_boxes(recording, hidden):
        long_down(recording, hidden, w2, products, pairs)
        return products
    product = _product(recording, "prefill_down", w2)
    recording.launch(
        by_tokens(_down_shape, product, pairs.cut),
        h=hidden,
        **matrix_arguments(w2, "w2"),
        **pairs.arguments,
        y=products,
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
        h_stride=hidden.stride(0),
    )
    return products


def _product(recording: Recording, function: str, weight: PackedWeight) -> TiledProduct:
    mode = _MODES[function]
    rows = weight.shape[-2]
    target = recording.target
    builds = tuple(
        (tile, build_for(weight.format, mode, target.architecture, tile=tile.fitting(mode, rows)))
        for tile in _TILES
    )
    return TiledProduct(function, builds, rows, target.multiprocessors)


def _gate_up_shape(
    product: TiledProduct, order: Cut | Split, some_long: bool, tokens: int
) -> Shape | None:
    """``order``: of pairs, or of all tokens in their order. ``some_long``: another launch takes
    steps of so many tokens that they are.
    """
    if isinstance(order, Cut):
        return product.shape(order.tiling(tokens), tokens=tokens, splits=1)
    if some_long and tokens >= order.long_from:
        return None
    splits = order.splits(tokens)
    return product.shape(Tiling.of_tokens(tokens), splits, tokens=tokens, splits=splits)


def _down_shape(product: TiledProduct, cut: Cut, tokens: int) -> Shape | None:
    return product.shape(cut.tiling(tokens))
