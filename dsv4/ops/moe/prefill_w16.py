"""``dsv4.ops.moe.prefill`` with its products on Blackwell's tensor cores, in the numbers of
``dsv4.ops.linear.prefill_w16``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.linear.aligned import empty_rows
from dsv4.ops.linear.cutedsl.gemm_config import W16Problem
from dsv4.ops.linear.prefill_long import one_group
from dsv4.ops.linear.prefill_w16 import W16Product, exact_scales, gemm_operands, linear
from dsv4.ops.moe import ExpertWeights, Mixture, grouped
from dsv4.ops.moe.operands import Layer
from dsv4.ops.moe.prefill import Routed, combine, moe_with
from dsv4.ops.moe.sorted_pairs import Cut, Sorted, sort_by_expert
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight


def moe(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Mixture:
    """``dsv4.ops.moe.prefill.moe``; a product without a kernel is the portable one."""
    layer = Layer(experts, shared, float(limit))
    return moe_with(linear, recording, x_TE, tokens_T, router, layer, _sum_part)


def gate_up(
    recording: Recording,
    x_TE: Tensor,
    w1: PackedWeight,
    w3: PackedWeight,
    limit: float,
    pairs: Sorted | None = None,
    weights_TP: Tensor | None = None,
) -> Tensor:
    """``dsv4.ops.moe.grouped.gate_up``: it rounds in the same places."""
    per_token = 1 if pairs is None else pairs.per_token
    rows = recording.tokens * per_token
    features, columns = w1.shape[-2:]
    problem = W16Problem(
        w1.format,
        torch.bfloat16,
        rows,
        features,
        columns,
        experts=0 if pairs is None else pairs.experts,
        gated=True,
        exact_scales=exact_scales(w1) and exact_scales(w3),
    )
    product = W16Product.of(recording, problem, per_token)
    if product is None:
        return grouped.gate_up(recording, x_TE, w1, w3, limit, pairs, weights_TP)
    hidden = empty_rows(recording, (rows, features), torch.bfloat16)
    weights = (*gemm_operands(w1), *gemm_operands(w3))
    if pairs is None or weights_TP is None:
        recording.call(_SharedGateUp(product, limit), x_TE, *weights, hidden)
    else:
        lists = (pairs.tiles, pairs.tile_count, pairs.slots, weights_TP)
        function = _SortedGateUp(product, limit, pairs.experts)
        recording.call(function, x_TE, *weights, *lists, hidden)
    return hidden


def down(recording: Recording, hidden: Tensor, w2: PackedWeight, pairs: Sorted) -> Tensor:
    """``dsv4.ops.moe.grouped.down``."""
    features, columns = w2.shape[-2:]
    problem = W16Problem(
        w2.format,
        torch.float32,
        hidden.shape[0],
        features,
        columns,
        experts=pairs.experts,
        exact_scales=exact_scales(w2),
    )
    product = W16Product.of(recording, problem, pairs.per_token)
    if product is None:
        return grouped.down(recording, hidden, w2, pairs)
    products = recording.empty((hidden.shape[0], features), torch.float32)
    lists = (pairs.tiles, pairs.tile_count, pairs.slots)
    function = _Down(product, pairs.experts)
    recording.call(function, hidden, *gemm_operands(w2), *lists, products)
    return products


def _sum_part(recording: Recording, routed: Routed, layer: Layer, y_TE: Tensor) -> None:
    experts, shared, limit = layer
    x_TE, ids_TP, weights_TP = routed
    pairs = sort_by_expert(recording, ids_TP, experts.w1.shape[0])
    hidden = gate_up(recording, x_TE, experts.w1, experts.w3, limit, pairs, weights_TP)
    products = down(recording, hidden, experts.w2, pairs)
    shared_hidden = gate_up(recording, x_TE, shared.w1, shared.w3, limit)
    shared_product = linear(recording, shared_hidden, shared.w2, torch.float32)
    combine(recording, shared_product, products, ids_TP, pairs, y_TE)


@dataclass(frozen=True)
class _SharedGateUp:
    product: W16Product
    limit: float

    def __call__(self, tokens: int, x_TE: Tensor, *operands: Tensor) -> None:
        """``operands``: data and scales of w1 and of w3, and the hidden rows ``[T, F]``."""
        gemm = self.product.gemm(tokens)
        assert gemm is not None
        *weights, hidden = operands
        nothing = [weights[0]] * 4
        x = one_group(x_TE[:tokens])
        gemm(x, *weights, *nothing, hidden[:tokens].unsqueeze(1), self.limit, 1)


@dataclass(frozen=True)
class _SortedGateUp:
    product: W16Product
    limit: float
    experts: int

    def __call__(self, tokens: int, x_TE: Tensor, *operands: Tensor) -> None:
        """``operands``: data and scales of w1 and of w3, tiles, their number, slots, routing
        weights ``[T, P]`` and the hidden rows ``[T·P, F]``.
        """
        gemm = self.product.gemm(tokens)
        assert gemm is not None
        *weights, tiles, tile_count, slots, weights_TP, hidden = operands
        per_token = self.product.rows_per_token
        pairs = tokens * per_token
        gemm(
            one_group(x_TE[:tokens]),
            *weights,
            tiles[: Cut(per_token, self.experts).tiling(tokens).most],
            tile_count,
            slots[:pairs],
            weights_TP[:tokens].flatten(),
            hidden[:pairs].unsqueeze(1),
            self.limit,
            per_token,
        )


@dataclass(frozen=True)
class _Down:
    product: W16Product
    experts: int

    def __call__(self, tokens: int, hidden: Tensor, *operands: Tensor) -> None:
        """``operands``: data and scales of w2, tiles, their number, slots and the products
        ``[T·P, E]``.
        """
        gemm = self.product.gemm(tokens)
        assert gemm is not None
        *weight, tiles, tile_count, slots, products = operands
        per_token = self.product.rows_per_token
        pairs = tokens * per_token
        gemm(
            one_group(hidden[:pairs]),
            *weight,
            *weight,
            tiles[: Cut(per_token, self.experts).tiling(tokens).most],
            tile_count,
            slots[:pairs],
            weight[0],
            products[:pairs].unsqueeze(1),
            0.0,
            per_token,
        )
