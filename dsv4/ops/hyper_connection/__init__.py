"""Manifold-constrained hyper-connections: M residual streams (model.md#residual-streams).

All mixing arithmetic is float32 until the last cast; the streams themselves stay in the compute
dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.norm import rms_norm


@dataclass(frozen=True)
class HcWeights:
    """Parameters of one seam, float32.

    fn ``[(2 + M)·M, M·E]``, base ``[(2 + M)·M]``, scale ``[3]`` (pre, post, comb).
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    hc_eps: float
    sinkhorn_iters: int


@dataclass(frozen=True)
class HcHeadWeights:
    """Parameters of the final collapse: fn float32 ``[M, M·E]``, base ``[M]``, scale ``[1]``."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    hc_eps: float


def hc_pre(
    streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapses the streams for a sublayer, and computes how the sublayer's output goes back.

    Returns (x ``[T, E]`` = rms_norm(Σ pre_i · x_i) in the dtype of the streams, the sum rounded to
    it as well, post float32 ``[T, M]``, comb float32 ``[T, M, M]``, doubly stochastic, first index
    = residual stream, second = output stream). ``norm_weight`` float32 ``[E]`` is the sublayer's
    norm.
    """
    streams = streams_TME.shape[1]
    mixes = _mixes(streams_TME, weights.fn, weights.norm_eps)
    pre, post, comb = mixes.split([streams, streams, streams * streams], dim=-1)
    base_pre, base_post, base_comb = weights.base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * weights.scale[0] + base_pre) + weights.hc_eps
    post = 2 * torch.sigmoid(post * weights.scale[1] + base_post)
    comb = (comb * weights.scale[2] + base_comb).unflatten(-1, (streams, streams))
    x_TE = rms_norm(_collapse(streams_TME, pre), norm_weight, weights.norm_eps)
    return x_TE, post, sinkhorn(comb, weights.sinkhorn_iters, weights.hc_eps)


def hc_post(y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """x'_k = post_k · y + Σ_j comb_jk · x_j: the sublayer's output y spread over the mixed streams.

    y ``[T, E]``, streams ``[T, M, E]`` in and out.
    """
    mixed = comb_TMM.transpose(1, 2) @ streams_TME.float()
    return (post_TM.unsqueeze(-1) * y_TE.float().unsqueeze(1) + mixed).to(streams_TME.dtype)


def hc_seam(
    y_TE: Tensor,
    streams_TME: Tensor,
    post_TM: Tensor,
    comb_TMM: Tensor,
    weights: HcWeights,
    norm_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``hc_post`` of one sublayer and ``hc_pre`` of the next: (streams, x, post, comb)."""
    streams_TME = hc_post(y_TE, streams_TME, post_TM, comb_TMM)
    return streams_TME, *hc_pre(streams_TME, weights, norm_weight)


def hc_head(streams_TME: Tensor, weights: HcHeadWeights, norm_weight: Tensor) -> Tensor:
    """Final hidden state ``[T, E]`` = rms_norm(Σ pre_i · x_i) of the last streams, no Sinkhorn.

    ``norm_weight`` float32 ``[E]`` is the final norm.
    """
    return rms_norm(hc_collapse(streams_TME, weights), norm_weight, weights.norm_eps)


def hc_collapse(streams_TME: Tensor, weights: HcHeadWeights) -> Tensor:
    """Σ pre_i · x_i of ``hc_head``, ``[T, E]``, without the norm."""
    mixes = _mixes(streams_TME, weights.fn, weights.norm_eps)
    pre = torch.sigmoid(mixes * weights.scale[0] + weights.base) + weights.hc_eps
    return _collapse(streams_TME, pre)


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Row softmax + eps, columns normalised, then ``iterations`` − 1 times rows and columns."""
    comb = torch.softmax(logits_TMM, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _mixes(streams_TME: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams_TME.flatten(1).float()
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _collapse(streams_TME: Tensor, pre_TM: Tensor) -> Tensor:
    return (pre_TM.unsqueeze(1) @ streams_TME.float()).squeeze(1).to(streams_TME.dtype)
