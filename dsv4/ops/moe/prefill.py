"""Mixture of experts for many tokens: sort by expert, two grouped GEMMs, one sum. Nothing returns to the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.loader import launch, multiprocessors
from dsv4.ops.linear.prefill import (
    MODE_DOWN,
    MODE_GATE_UP,
    THREADS,
    TILE_TOKENS,
    aligned_rows,
    build_for,
    linear_batches,
    matrix_arguments,
)
from dsv4.ops.moe import ExpertWeights
from dsv4.weights.packed import PackedWeight, padded

_WORKSPACE_BYTES, _SORT_SHARED_LIMIT = 1 << 30, 220 << 10
_GATE_UP_ROWS, _DOWN_ROWS = 128, 256
_SORT_THREADS, _SORT_WARPS, _COMBINE_THREADS = 1024, 32, 256


@dataclass(frozen=True)
class Sorted:
    """Pairs (token, slot) in expert order: ``slots`` int32 ``[T·P]`` holds token · P + slot. ``tiles`` int32
    ``[most, 4]`` {expert, first position, pairs}, of which ``tile_count`` int32 ``[1]`` are in use.
    ``wide``: the average tile holds more than half of that.
    """

    slots: Tensor
    tiles: Tensor
    tile_count: Tensor
    wide: bool


def moe_prefill(
    x_TE: Tensor,
    ids_TP: Tensor,
    weights_TP: Tensor,
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Tensor:
    """``dsv4.ops.moe.expert_sum`` for bfloat16 x ``[T, E]``, ids int64 and weights float32 ``[T, P]``, packed experts.

    Rounds where the reference does: the weighted hidden rows and the result, to bfloat16; products and the sum over
    experts in ascending order are float32. An id outside [0, X) adds nothing. The tokens are taken in parts that keep
    the workspace near 1 GiB; a token's result does not depend on the parts. Arguments are already checked.
    """
    x_TE, ids_TP, weights_TP = aligned_rows(x_TE), ids_TP.contiguous(), weights_TP.contiguous()
    tokens, per_token = ids_TP.shape
    count, inner, width = experts.w1.shape
    token_bytes = per_token * (4 * width + 2 * inner) + 4 * width + 2 * shared.w1.shape[0]
    sort_pairs = (_SORT_SHARED_LIMIT - 4 * (count + 1) * (_SORT_WARPS + 2)) // 4
    most = max(TILE_TOKENS, min(_WORKSPACE_BYTES // token_bytes, sort_pairs // per_token) // TILE_TOKENS * TILE_TOKENS)
    y_TE = torch.empty((tokens, width), dtype=x_TE.dtype, device=x_TE.device)
    for start in range(0, tokens, most):
        part = slice(start, min(start + most, tokens))
        _moe_part(x_TE[part], ids_TP[part], weights_TP[part], experts, shared, limit, y_TE[part])
    return y_TE


def _moe_part(
    x_TE: Tensor,
    ids_TP: Tensor,
    weights_TP: Tensor,
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
    y_TE: Tensor,
) -> None:
    pairs = sort_by_expert(ids_TP, experts.w1.shape[0])
    hidden = gate_up(x_TE, experts.w1, experts.w3, limit, pairs, weights_TP)
    routed = down(hidden, experts.w2, pairs)
    shared_hidden = gate_up(x_TE, shared.w1, shared.w3, limit)
    total = linear_batches(shared_hidden.unsqueeze(1), shared.w2, torch.float32)
    width, per_token = y_TE.shape[1], ids_TP.shape[1]
    launch(
        *("moe_combine", "moe_combine", ids_TP.shape[0], _COMBINE_THREADS, total, routed, ids_TP, y_TE),
        *(width, per_token, experts.w1.shape[0]),
        device=x_TE.device,
    )


def sort_by_expert(ids_TP: Tensor, experts: int) -> Sorted:
    """The stable order of ids int64 ``[T, P]`` by expert, cut into tiles of at most 128 pairs of one expert."""
    pairs, device = ids_TP.numel(), ids_TP.device
    most = pairs // TILE_TOKENS + min(experts, pairs)
    slots = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((most, 4), dtype=torch.int32, device=device)
    tile_count = torch.empty(1, dtype=torch.int32, device=device)
    launch(
        *("moe_sort", "moe_sort", 1, _SORT_THREADS, ids_TP, slots, tiles, tile_count, pairs, experts),
        device=device,
        shared_bytes=4 * (experts + 1) * (_SORT_WARPS + 2) + 4 * pairs,
    )
    return Sorted(slots, tiles, tile_count, wide=pairs > TILE_TOKENS // 2 * experts)


def gate_up(
    x_TE: Tensor,
    w1: PackedWeight,
    w3: PackedWeight,
    limit: float,
    pairs: Sorted | None = None,
    weights_TP: Tensor | None = None,
) -> Tensor:
    """round(weight · silu(min(g, limit)) · clamp(u, ±limit)) with g = w1 · x, u = w3 · x: bfloat16 rows.

    With ``pairs``: one row per pair in sorted order, experts w1, w3 ``[X, F, E]``, routing weights float32 ``[T, P]``.
    Without: one row per token, w1, w3 ``[F, E]``, weight 1. Rows are ``[F]`` with a stride of 16-byte multiples.
    """
    tokens, columns = x_TE.shape
    rows, device = w1.shape[-2], x_TE.device
    count = tokens if pairs is None else pairs.slots.shape[0]
    most_tiles = -(-tokens // TILE_TOKENS) if pairs is None else pairs.tiles.shape[0]
    stride = -(-rows // 8) * 8
    hidden = torch.empty((count, stride), dtype=torch.bfloat16, device=device)
    sorted_parts = (None,) * 3 if pairs is None else (pairs.tiles, pairs.tile_count, pairs.slots)
    per_token = 1 if weights_TP is None else weights_TP.shape[1]
    wide = tokens > TILE_TOKENS // 2 if pairs is None else pairs.wide
    variant = build_for(w1.format, MODE_GATE_UP, device, wide=wide)
    launch(
        *(variant.source, "prefill_gate_up", min(most_tiles * -(-rows // _GATE_UP_ROWS), multiprocessors(device))),
        *(THREADS, x_TE, *matrix_arguments(w1), *matrix_arguments(w3), *sorted_parts, weights_TP, hidden),
        *(tokens, rows, columns, padded(rows) // 16, x_TE.stride(0), stride, per_token, float(limit)),
        device=device,
        shared_bytes=variant.shared_bytes,
        defines=variant.defines,
    )
    return hidden[:, :rows]


def down(hidden: Tensor, w2: PackedWeight, pairs: Sorted) -> Tensor:
    """w2[expert] · hidden of every pair: float32 ``[T·P, E]`` in the order of ids; rows of ids that are no expert are
    not written.
    """
    rows, columns = w2.shape[-2:]
    device = hidden.device
    products = torch.empty((hidden.shape[0], rows), dtype=torch.float32, device=device)
    variant = build_for(w2.format, MODE_DOWN, device, wide=pairs.wide)
    launch(
        *(variant.source, "prefill_down", min(pairs.tiles.shape[0] * -(-rows // _DOWN_ROWS), multiprocessors(device))),
        *(THREADS, hidden, *matrix_arguments(w2), pairs.tiles, pairs.tile_count, pairs.slots, products),
        *(rows, columns, padded(rows) // 16, hidden.stride(0)),
        device=device,
        shared_bytes=variant.shared_bytes,
        defines=variant.defines,
    )
    return products
