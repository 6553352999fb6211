"""Hyper-connections: split, Sinkhorn, collapse and mixing."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops import Ops
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights, sinkhorn
from tests.ops.cases import EPS, VECTORS, assert_rounded_once, normal

STREAMS, MIXES = 4, 24


def seam(width: int, seed: int) -> HcWeights:
    fn = normal(MIXES, STREAMS * width, seed=seed, scale=width**-0.5)
    return HcWeights(fn, normal(MIXES, seed=seed + 1), torch.tensor([0.9, 1.1, 0.5]), EPS, EPS, sinkhorn_iters=20)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def exact_sinkhorn(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    n = range(len(logits))
    peaks = [max(row) for row in logits]
    totals = [sum(math.exp(logits[j][k] - peaks[j]) for k in n) for j in n]
    comb = [[math.exp(logits[j][k] - peaks[j]) / totals[j] + eps for k in n] for j in n]
    for iteration in range(iterations):
        if iteration > 0:
            comb = [[value / (sum(row) + eps) for value in row] for row in comb]
        columns = [sum(comb[j][k] for j in n) + eps for k in n]
        comb = [[comb[j][k] / columns[k] for k in n] for j in n]
    return comb


def exact_mixes(streams: Tensor, fn: Tensor, eps: float) -> list[float]:
    flat = streams.double().flatten()
    scale = (float(flat.square().sum()) / len(flat) + eps) ** -0.5
    return [float(row.double() @ flat) * scale for row in fn]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["normal", "where_eps_matters"])
def test_hc_pre_equals_the_formula(ops: Ops, dtype: torch.dtype, size: float) -> None:
    weights = seam(64, seed=1)
    streams_TME = normal(3, STREAMS, 64, seed=5, dtype=dtype, scale=size)
    u_TE, post_TM, comb_TMM = ops.hc_pre(streams_TME, weights)
    assert (u_TE.dtype, post_TM.dtype, comb_TMM.dtype) == (dtype, torch.float32, torch.float32)
    base, scale = weights.base.tolist(), weights.scale.tolist()
    for t, streams in enumerate(streams_TME):
        m = exact_mixes(streams, weights.fn, EPS)
        pre = [sigmoid(m[i] * scale[0] + base[i]) + EPS for i in range(4)]
        post = [2 * sigmoid(m[4 + i] * scale[1] + base[4 + i]) for i in range(4)]
        logits = [[m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)]
        assert_rounded_once(u_TE[t], sum((p * x.double() for p, x in zip(pre, streams, strict=True)), torch.zeros(64)))
        assert post_TM[t].tolist() == pytest.approx(post, rel=1e-5)
        exact = exact_sinkhorn(logits, 20, EPS)
        assert comb_TMM[t].flatten().tolist() == pytest.approx([v for row in exact for v in row], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hc_post_mixes_over_the_first_index_of_comb(ops: Ops, dtype: torch.dtype) -> None:
    y_TE, streams_TME = normal(2, 32, seed=6, dtype=dtype), normal(2, STREAMS, 32, seed=7, dtype=dtype)
    post_TM, comb_TMM = normal(2, STREAMS, seed=8), normal(2, STREAMS, STREAMS, seed=9)
    out = ops.hc_post(y_TE, streams_TME, post_TM, comb_TMM)
    assert out.dtype == dtype
    y, x, post, comb = y_TE.double(), streams_TME.double(), post_TM.double(), comb_TMM.double()
    for k in range(STREAMS):
        exact = post[:, k, None] * y + sum((comb[:, j, k, None] * x[:, j] for j in range(STREAMS)), torch.zeros(1))
        assert_rounded_once(out[:, k], exact)


def test_published_split(ops: Ops) -> None:
    """Streams 2·e_i have mean square 1 and show pre one by one; fn reads the mixes out of the first value."""
    case = VECTORS["hc_split"]
    fn = torch.zeros(MIXES, STREAMS * STREAMS)
    fn[:, 0] = torch.tensor(case["mixes"]) / 2
    weights = HcWeights(fn, torch.tensor(case["base"]), torch.tensor(case["scale"]), 0.0, EPS, sinkhorn_iters=20)
    u, post, comb = ops.hc_pre(2 * torch.eye(STREAMS)[None], weights)
    assert (u[0] / 2).tolist() == pytest.approx(case["pre"], abs=2e-7)
    assert post[0].tolist() == pytest.approx(case["post"], abs=2e-7)
    assert comb.flatten().tolist() == pytest.approx(case["comb_row_major"], abs=2e-7)


def test_published_post(ops: Ops) -> None:
    split, case = VECTORS["hc_split"], VECTORS["hc_post"]
    out = ops.hc_post(
        torch.tensor([case["y"]]),
        torch.tensor(case["residual_4x2"]).reshape(1, 4, 2),
        torch.tensor([split["post"]]),
        torch.tensor(split["comb_row_major"]).reshape(1, 4, 4),
    )
    assert out.flatten().tolist() == pytest.approx(case["out_4x2"], abs=5e-7)


def test_sinkhorn_ends_with_columns() -> None:
    comb = sinkhorn(normal(5, 4, 4, seed=10, scale=3.0), 20, EPS)
    torch.testing.assert_close(comb.sum(1), torch.full((5, 4), 1 - EPS), rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["normal", "where_eps_matters"])
def test_hc_head_is_a_sigmoid_collapse(ops: Ops, dtype: torch.dtype, size: float) -> None:
    weights = HcHeadWeights(normal(4, 256, seed=11), normal(4, seed=12), torch.tensor([0.7]), EPS, EPS)
    streams_TME = normal(2, STREAMS, 64, seed=13, dtype=dtype, scale=size)
    z_TE = ops.hc_head(streams_TME, weights)
    assert z_TE.dtype == dtype
    for z, streams in zip(z_TE, streams_TME, strict=True):
        m = exact_mixes(streams, weights.fn, EPS)
        pre = [sigmoid(m[i] * 0.7 + float(weights.base[i])) + EPS for i in range(4)]
        assert_rounded_once(z, sum((p * x.double() for p, x in zip(pre, streams, strict=True)), torch.zeros(64)))


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_counts_its_first_softmax(iterations: int) -> None:
    logits = normal(4, 4, seed=14, scale=4.0)
    exact = exact_sinkhorn(logits.tolist(), iterations, EPS)
    found = sinkhorn(logits[None], iterations, EPS)[0].tolist()
    assert [v for row in found for v in row] == pytest.approx([v for row in exact for v in row], rel=2e-6)


def test_extreme_logits_stay_finite_and_doubly_stochastic() -> None:
    """A permutation with huge logits: eps keeps every division defined."""
    comb = sinkhorn(1e4 * torch.eye(4)[[1, 0, 3, 2]][None], 20, EPS)
    torch.testing.assert_close(comb[0], torch.eye(4)[[1, 0, 3, 2]], rtol=0, atol=1e-5)


def test_no_tokens(ops: Ops) -> None:
    u_TE, post_TM, comb_TMM = ops.hc_pre(torch.empty(0, STREAMS, 64), seam(64, seed=15))
    assert (u_TE.shape, post_TM.shape, comb_TMM.shape) == ((0, 64), (0, 4), (0, 4, 4))
    assert ops.hc_post(u_TE, torch.empty(0, STREAMS, 64), post_TM, comb_TMM).shape == (0, STREAMS, 64)
