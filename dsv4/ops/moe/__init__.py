"""Mixture of experts: routed experts and the shared expert, clamped SwiGLU (model.md#experts)."""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from dsv4.ops.quantize_activations import hidden_global_scale
from dsv4.ops.quantize_activations.emulated import multiplied
from dsv4.ops.router import AnyWeight, Router, route


@dataclass(frozen=True)
class ExpertWeights(Generic[AnyWeight]):
    """w1 (gate) and w3 (up) ``[F, E]``, w2 (down) ``[E, F]``; routed experts are stacked with a
    leading X.
    """

    w1: AnyWeight
    w2: AnyWeight
    w3: AnyWeight


class Mixture(NamedTuple):
    """The result ``[T, E]``, or the sum over the ranks on its way to it, and the routes behind it:
    expert ids int64 and weights float32 ``[T, P]``.
    """

    y_TE: Any
    ids_TP: Tensor
    weights_TP: Tensor


class RoutingWeight(NamedTuple):
    """Float32 ``[T, 1]`` or one number, none above ``largest``."""

    values: Tensor | float
    largest: float


def moe(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    out_dtype: torch.dtype | None = None,
) -> Mixture:
    """Routes x ``[T, E]``, the hidden states of the token ids int64 ``[T]``, and returns
    ``expert_sum`` ``[T, E]`` with the routes; float32 as ``out_dtype`` leaves the sum unrounded.
    """
    routes = route(x_TE, tokens_T, router)
    sum_TE = _unrounded_sum(x_TE, *routes, experts, shared, limit, router.scaling)
    return Mixture(sum_TE.to(out_dtype or x_TE.dtype), *routes)


def expert_sum(
    x_TE: Tensor,
    ids_TP: Tensor,
    weights_TP: Tensor,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    largest_weight: float = 1.0,
) -> Tensor:
    """Σ_p expert(ids_p, x, weight_p) + shared(x): ``[T, E]`` in the dtype of x, summed in float32,
    expert order ascending.

    An expert is w2 · round(weight · silu(min(g, limit)) · clamp(u, ±limit)) with g = w1 · x and u =
    w3 · x in float32; the routing weight multiplies before the one rounding to the dtype of x. The
    shared expert has weight 1 and the same clamp. ``largest_weight``: no routing weight is above
    it, which NVFP4 activations of w2 need (``hidden_global_scale``).
    """
    sum_TE = _unrounded_sum(x_TE, ids_TP, weights_TP, experts, shared, limit, largest_weight)
    return sum_TE.to(x_TE.dtype)


def _unrounded_sum(
    x_TE: Tensor,
    ids_TP: Tensor,
    weights_TP: Tensor,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    largest_weight: float,
) -> Tensor:
    tokens_of_step = x_TE.shape[0]
    total = clamped_swiglu_mlp(x_TE, shared, limit, tokens_of_step, RoutingWeight(1.0, 1.0))
    for expert in ids_TP.unique().tolist():
        tokens, slots = (ids_TP == expert).nonzero(as_tuple=True)
        one = ExpertWeights(experts.w1[expert], experts.w2[expert], experts.w3[expert])
        weight = RoutingWeight(weights_TP[tokens, slots, None], largest_weight)
        y_TE = clamped_swiglu_mlp(x_TE[tokens], one, limit, tokens_of_step, weight)
        total.index_add_(0, tokens, y_TE)
    return total


def clamped_swiglu_mlp(
    x_TE: Tensor,
    expert: ExpertWeights,
    limit: float,
    tokens_of_step: int,
    weight: RoutingWeight,
) -> Tensor:
    """One expert on the rows x ``[T, E]`` of a step: float32 ``[T, E]``."""
    gate = multiplied(x_TE, expert.w1, tokens_of_step) @ expert.w1.dequantize().T
    up = multiplied(x_TE, expert.w3, tokens_of_step) @ expert.w3.dequantize().T
    gated = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    hidden_TF = (gated * weight.values).to(x_TE.dtype)
    global_scale = hidden_global_scale(limit, weight.largest)
    read_TF = multiplied(hidden_TF, expert.w2, tokens_of_step, global_scale)
    return read_TF @ expert.w2.dequantize().T
