"""Hyper-connection in float64: what the kernels are compared with."""

import torch
from torch import Tensor

from dsv4.ops.hyper_connection import HcWeights
from tests.ops.cases import EPS, HC_EPS
from tests.ops.rounding import assert_rounded_twice

# Relative, of the pre, post and comb that follow from a mix; the mix itself is a float32 sum.
MIX_BOUND = 2e-5


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def seam_weights(streams: int, width: int, spread: float = 1.0) -> HcWeights:
    mixes = (2 + streams) * streams
    fn = normal(mixes, streams * width) * (streams * width) ** -0.5
    return HcWeights(
        fn,
        spread * normal(mixes),
        torch.tensor([0.9, 1.1, 0.5], device="cuda") * spread,
        EPS,
        HC_EPS,
        20,
    )


def mixing(tokens: int, streams: int) -> tuple[Tensor, Tensor]:
    return 2 * normal(tokens, streams).sigmoid(), normal(tokens, streams, streams).softmax(1)


def exact_post(y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    mixed = comb_TMM.double().transpose(1, 2) @ streams_TME.double()
    return post_TM.double().unsqueeze(-1) * y_TE.double().unsqueeze(1) + mixed


def exact_mixes(streams_TME: Tensor, fn: Tensor) -> Tensor:
    flat = streams_TME.double().flatten(1)
    return (flat @ fn.double().T) * (flat.square().mean(-1, keepdim=True) + EPS) ** -0.5


def exact_parts(streams_TME: Tensor, weights: HcWeights) -> tuple[Tensor, Tensor, Tensor]:
    streams = streams_TME.shape[1]
    sizes = [streams, streams, streams * streams]
    mixes = exact_mixes(streams_TME, weights.fn).split(sizes, dim=-1)
    bases = weights.base.double().split(sizes)
    logits = [
        mix * scale + base
        for mix, scale, base in zip(mixes, weights.scale.double(), bases, strict=True)
    ]
    comb = torch.softmax(logits[2].unflatten(-1, (streams, streams)), dim=-1) + HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(weights.sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    return logits[0].sigmoid() + HC_EPS, 2 * logits[1].sigmoid(), comb


def assert_normalised(
    x_TE: Tensor, pre_TM: Tensor, streams_TME: Tensor, norm_weight: Tensor
) -> None:
    def normalised(u_E: Tensor) -> Tensor:
        return u_E * (u_E.square().mean() + EPS) ** -0.5 * norm_weight.double()

    collapsed_TE = (pre_TM.unsqueeze(-1) * streams_TME.double()).sum(1)
    for x_E, u_E in zip(x_TE, collapsed_TE, strict=True):
        assert_rounded_twice(x_E, u_E, normalised)


def assert_pre(
    found: tuple[Tensor, ...], streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
) -> None:
    x_TE, post_TM, comb_TMM = found
    assert (x_TE.dtype, post_TM.dtype, comb_TMM.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    pre, post, comb = exact_parts(streams_TME, weights)
    torch.testing.assert_close(post_TM.double(), post, rtol=MIX_BOUND, atol=1e-9)
    torch.testing.assert_close(comb_TMM.double(), comb, rtol=MIX_BOUND, atol=1e-9)
    assert_normalised(x_TE, pre, streams_TME, norm_weight)
