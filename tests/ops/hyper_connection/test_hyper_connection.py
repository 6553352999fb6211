"""Hyper-connections: split, Sinkhorn, collapse and mixing."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops import TORCH, Ops
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights, sinkhorn
from tests.ops.cases import EPS, HC_EPS, VECTORS, assert_rounded_once, by_device, normal
from tests.ops.rounding import assert_rounded_twice

STREAMS = 4
MIXES = 24


def seam(width: int, seed: int) -> HcWeights:
    fn = normal(MIXES, STREAMS * width, seed=seed, scale=width**-0.5)
    return HcWeights(
        fn,
        normal(MIXES, seed=seed + 1),
        torch.tensor([0.9, 1.1, 0.5]),
        EPS,
        HC_EPS,
        sinkhorn_iters=20,
    )


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


def exact_norm(u_E: Tensor, norm_weight: Tensor) -> Tensor:
    return u_E * (u_E.square().mean() + EPS) ** -0.5 * norm_weight.double()


def exact_collapse(pre: list[float], streams_ME: Tensor) -> Tensor:
    return (torch.tensor(pre, dtype=torch.float64)[:, None] * streams_ME.double()).sum(0)


def assert_normalised_collapse(
    x_E: Tensor, pre: list[float], streams_ME: Tensor, norm_weight: Tensor
) -> None:
    """x = rms_norm(Σ pre_i · x_i), the sum rounded to the dtype of x."""
    assert_rounded_twice(
        x_E, exact_collapse(pre, streams_ME), lambda u_E: exact_norm(u_E, norm_weight)
    )


def exact_mixes(streams: Tensor, fn: Tensor, eps: float) -> list[float]:
    flat = streams.double().flatten()
    scale = (float(flat.square().sum()) / len(flat) + eps) ** -0.5
    return [float(row.double() @ flat) * scale for row in fn]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["normal", "where_eps_matters"])
def test_hc_pre_equals_the_formula(ops: Ops, dtype: torch.dtype, size: float) -> None:
    weights = seam(64, seed=1)
    streams_TME = normal(3, STREAMS, 64, seed=5, dtype=dtype, scale=size)
    norm_weight = normal(64, seed=16)
    x_TE, post_TM, comb_TMM = ops.hc_pre(streams_TME, weights, norm_weight)
    assert (x_TE.dtype, post_TM.dtype, comb_TMM.dtype) == (dtype, torch.float32, torch.float32)
    base = weights.base.tolist()
    scale = weights.scale.tolist()
    for t, streams in enumerate(streams_TME):
        m = exact_mixes(streams, weights.fn, EPS)
        pre = [sigmoid(m[i] * scale[0] + base[i]) + HC_EPS for i in range(4)]
        post = [2 * sigmoid(m[4 + i] * scale[1] + base[4 + i]) for i in range(4)]
        logits = [
            [m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)
        ]
        assert_normalised_collapse(x_TE[t], pre, streams, norm_weight)
        assert post_TM[t].tolist() == pytest.approx(post, rel=by_device(2e-6, 1e-5))
        exact = exact_sinkhorn(logits, 20, HC_EPS)
        assert comb_TMM[t].flatten().tolist() == pytest.approx(
            [v for row in exact for v in row], rel=by_device(2e-6, 1e-5)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hc_post_mixes_over_the_first_index_of_comb(ops: Ops, dtype: torch.dtype) -> None:
    y_TE = normal(2, 32, seed=6, dtype=dtype)
    streams_TME = normal(2, STREAMS, 32, seed=7, dtype=dtype)
    post_TM = normal(2, STREAMS, seed=8)
    comb_TMM = normal(2, STREAMS, STREAMS, seed=9)
    out = ops.hc_post(y_TE, streams_TME, post_TM, comb_TMM)
    assert out.dtype == dtype
    y = y_TE.double()
    x = streams_TME.double()
    post = post_TM.double()
    comb = comb_TMM.double()
    for k in range(STREAMS):
        exact = post[:, k, None] * y + sum(
            (comb[:, j, k, None] * x[:, j] for j in range(STREAMS)), torch.zeros(1)
        )
        assert_rounded_once(out[:, k], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3])
def test_hc_seam_is_post_then_pre_of_the_rounded_streams(
    ops: Ops, dtype: torch.dtype, tokens: int
) -> None:
    weights = seam(64, seed=20)
    norm_weight = normal(64, seed=21)
    y_TE = normal(tokens, 64, seed=22, dtype=dtype)
    streams_TME = normal(tokens, STREAMS, 64, seed=23, dtype=dtype)
    mixing = (
        2 * normal(tokens, STREAMS, seed=24).sigmoid(),
        normal(tokens, STREAMS, STREAMS, seed=25).softmax(1),
    )
    before_TME = streams_TME.clone()
    found_TME, x_TE, post_TM, comb_TMM = ops.hc_seam(
        y_TE, streams_TME, *mixing, weights, norm_weight
    )
    assert torch.equal(streams_TME, before_TME), "the streams before the seam are not overwritten"
    assert (found_TME.dtype, x_TE.dtype) == (dtype, dtype)
    post, comb = (part.double() for part in mixing)
    for k in range(STREAMS):
        mixed = sum(
            (comb[:, j, k, None] * streams_TME[:, j].double() for j in range(STREAMS)),
            torch.zeros(1),
        )
        assert_rounded_once(found_TME[:, k], post[:, k, None] * y_TE.double() + mixed)
    expected = TORCH.hc_pre(found_TME, weights, norm_weight)
    base = weights.base.tolist()
    scale = weights.scale.tolist()
    for x_E, streams_ME in zip(x_TE, found_TME, strict=True):
        m = exact_mixes(streams_ME, weights.fn, EPS)
        pre = [sigmoid(m[i] * scale[0] + base[i]) + HC_EPS for i in range(4)]
        assert_normalised_collapse(x_E, pre, streams_ME, norm_weight)
    torch.testing.assert_close(post_TM, expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(comb_TMM, expected[2], rtol=1e-5, atol=0)


def test_published_split(ops: Ops) -> None:
    """Streams 2·e_i have mean square 1 and show pre one by one, up to the norm.

    fn reads the mixes out of the first value.
    """
    case = VECTORS["hc_split"]
    fn = torch.zeros(MIXES, STREAMS * STREAMS)
    fn[:, 0] = torch.tensor(case["mixes"]) / 2
    weights = HcWeights(
        fn, torch.tensor(case["base"]), torch.tensor(case["scale"]), 0.0, EPS, sinkhorn_iters=20
    )
    x, post, comb = ops.hc_pre(2 * torch.eye(STREAMS)[None], weights, torch.ones(STREAMS))
    mean_square = sum(value**2 for value in case["pre"]) / STREAMS
    assert (x[0] * mean_square**0.5).tolist() == pytest.approx(case["pre"], abs=2e-7)
    assert post[0].tolist() == pytest.approx(case["post"], abs=2e-7)
    assert comb.flatten().tolist() == pytest.approx(case["comb_row_major"], abs=2e-7)


def test_published_post(ops: Ops) -> None:
    split = VECTORS["hc_split"]
    case = VECTORS["hc_post"]
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
    weights = HcHeadWeights(
        normal(4, 256, seed=11), normal(4, seed=12), torch.tensor([0.7]), EPS, HC_EPS
    )
    streams_TME = normal(2, STREAMS, 64, seed=13, dtype=dtype, scale=size)
    norm_weight = normal(64, seed=17)
    z_TE = ops.hc_head(streams_TME, weights, norm_weight)
    assert z_TE.dtype == dtype
    for z, streams in zip(z_TE, streams_TME, strict=True):
        m = exact_mixes(streams, weights.fn, EPS)
        pre = [sigmoid(m[i] * 0.7 + float(weights.base[i])) + HC_EPS for i in range(4)]
        assert_normalised_collapse(z, pre, streams, norm_weight)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_counts_its_first_softmax(iterations: int) -> None:
    logits = normal(4, 4, seed=14, scale=4.0)
    exact = exact_sinkhorn(logits.tolist(), iterations, EPS)
    found = sinkhorn(logits[None], iterations, EPS)[0].tolist()
    assert [v for row in found for v in row] == pytest.approx(
        [v for row in exact for v in row], rel=2e-6
    )


def test_extreme_logits_stay_finite_and_doubly_stochastic() -> None:
    """A permutation with huge logits: eps keeps every division defined."""
    comb = sinkhorn(1e4 * torch.eye(4)[[1, 0, 3, 2]][None], 20, EPS)
    torch.testing.assert_close(comb[0], torch.eye(4)[[1, 0, 3, 2]], rtol=0, atol=1e-5)
