"""rms_norm: float32 inside, plain weight, one rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.ops import norm
from dsv4.ops.immediate import immediately
from dsv4.ops.norm import cuda
from tests.ops.cases import ELEMENTWISE, EPS, HEAD_DIM, assert_rounded_once, normal
from tests.ops.conftest import skipping_float32

RmsNorm = Callable[[Tensor, Tensor | None, float], Tensor]


@pytest.fixture
def rms_norm(backend: str) -> RmsNorm:
    return norm.rms_norm if backend == "torch" else skipping_float32(immediately(cuda.rms_norm))


def exact_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        mean_square = sum(float(value) ** 2 for value in row) / len(row)
        rows.append(row / (mean_square + eps) ** 0.5)
    out = torch.stack(rows).reshape(x.shape)
    return out if weight is None else out * weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("shape", [(1, 128), (3, 96), (2, 4, HEAD_DIM)])
def test_equals_the_formula_rounded_once(
    rms_norm: RmsNorm,
    backend: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    shape: tuple[int, ...],
) -> None:
    if backend == "cuda" and weight_dtype == torch.bfloat16:
        pytest.skip("the CUDA op takes float32 weights, as every model has them")
    x = normal(*shape, seed=1, dtype=dtype)
    weight = None if weight_dtype is None else normal(shape[-1], seed=2, dtype=weight_dtype)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_rounded_once(out, exact_rms_norm(x, weight, EPS), ELEMENTWISE)


def test_lesson_01_q_is_normalised_per_head(rms_norm: RmsNorm) -> None:
    q_THD = normal(2, 4, HEAD_DIM, seed=3) * torch.tensor([0.01, 1.0, 30.0, 4.0])[:, None]
    mean_square_TH = rms_norm(q_THD, None, EPS).square().mean(-1)
    assert torch.allclose(mean_square_TH, torch.ones(2, 4), atol=2e-2), (
        "each head has its own scale"
    )


def test_weight_multiplies_as_it_is(rms_norm: RmsNorm) -> None:
    x = normal(4, 64, seed=4)
    assert bool((rms_norm(x, torch.zeros(64), EPS) == 0).all()), "the weight is w, not 1 + w"


def test_zero_row_stays_finite(rms_norm: RmsNorm) -> None:
    assert bool((rms_norm(torch.zeros(2, 64), None, EPS) == 0).all())


def test_bfloat16_squares_do_not_overflow_or_lose_precision(rms_norm: RmsNorm) -> None:
    x = normal(2, 256, seed=5, dtype=torch.bfloat16, scale=1e18)
    assert_rounded_once(rms_norm(x, None, EPS), exact_rms_norm(x, None, EPS), ELEMENTWISE)


def test_no_tokens_and_strided_input(rms_norm: RmsNorm) -> None:
    assert rms_norm(torch.empty(0, 64), None, EPS).shape == (0, 64)
    wide = normal(3, 128, seed=6)
    assert torch.equal(
        rms_norm(wide[:, ::2], None, EPS), rms_norm(wide[:, ::2].contiguous(), None, EPS)
    )
