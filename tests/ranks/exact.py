"""Torch ops whose sums do not depend on how a weight is cut: products, SwiGLU and sums over the
ranks in float64, attention head by head.

Rounded to float32 once, a sum of float64 terms is the same in every order, but for about one in
2^28: what the tests compare bit for bit does not meet one. So a wrong cut, a term that is missing
or counted twice cannot hide in a tolerance.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.ops import TORCH, Ops
from dsv4.ops.linear import RowList
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.norm import rms_norm
from dsv4.ops.router import Router, route
from dsv4.weights.quant import Weight


def product(x: Tensor, weight: Weight) -> Tensor:
    """float64 x · Wᵀ."""
    return x.double() @ weight.dequantize().double().T


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """What is asked for in float32 is a partial result: it stays in float64."""
    exact = product(x, weight)
    return exact if out_dtype is torch.float32 else exact.to(out_dtype or x.dtype)


def row_parallel_linear(x_TK: Tensor, weight: Weight) -> Tensor:
    return product(x_TK, weight).to(x_TK.dtype)


def vocab_parallel_linear(hidden_TE: Tensor, weight: Weight) -> Tensor:
    return product(hidden_TE, weight).float()


def linear_rows(
    x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> tuple[Tensor, ...]:
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    pairs = zip(rows.weights, rows.out_dtypes, strict=True)
    return tuple(product(x, weight).to(dtype or x.dtype) for weight, dtype in pairs)


def grouped_linear(x_TGK: Tensor, weight: Weight) -> Tensor:
    weight_GRK = weight.dequantize().double().unflatten(0, (x_TGK.shape[1], -1))
    return torch.einsum("tgk,grk->tgr", x_TGK.double(), weight_GRK).to(x_TGK.dtype)


def moe(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    out_dtype: torch.dtype | None = None,
) -> Mixture:
    """As ``linear``: a partial result stays in float64."""
    ids_TP, weights_TP = route(x_TE, tokens_T, router)
    total = _expert(x_TE, shared, limit, 1.0)
    for expert in ids_TP.unique().tolist():
        tokens, slots = (ids_TP == expert).nonzero(as_tuple=True)
        one = ExpertWeights(experts.w1[expert], experts.w2[expert], experts.w3[expert])
        weight = weights_TP[tokens, slots, None].double()
        total.index_add_(0, tokens, _expert(x_TE[tokens], one, limit, weight))
    y_TE = total if out_dtype is torch.float32 else total.to(out_dtype or x_TE.dtype)
    return Mixture(y_TE, ids_TP, weights_TP)


def _expert(x: Tensor, expert: ExpertWeights, limit: float, weight: Tensor | float) -> Tensor:
    gate = product(x, expert.w1).clamp(max=limit)
    up = product(x, expert.w3).clamp(-limit, limit)
    hidden = (torch.nn.functional.silu(gate) * up * weight).to(x.dtype)
    return product(hidden, expert.w2)


def head_by_head(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention whose arithmetic does not depend on how many heads a rank has."""

    def heads(q_THD: Tensor, keys: Any, selected: Any, sink_H: Tensor, *others: Any) -> Tensor:
        found = [
            attend(q_THD[:, head : head + 1], keys, selected, sink_H[head : head + 1], *others)
            for head in range(q_THD.shape[1])
        ]
        return torch.cat(found, 1)

    return heads


EXACT: Ops = replace(
    TORCH,
    linear=linear,
    row_parallel_linear=row_parallel_linear,
    vocab_parallel_linear=vocab_parallel_linear,
    linear_rows=linear_rows,
    grouped_linear=grouped_linear,
    moe=moe,
    sparse_attention=head_by_head(TORCH.sparse_attention),
)
