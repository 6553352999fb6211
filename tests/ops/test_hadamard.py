"""The Hadamard rotation of the indexer."""

import pytest
import torch

from dsv4.ops.hadamard import hadamard
from tests.ops.cases import assert_rounded_once, exact_sylvester, normal


@pytest.mark.parametrize("width", [1, 2, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_is_the_sylvester_matrix_times_its_inverse_norm(width: int, dtype: torch.dtype) -> None:
    x = normal(3, 2, width, seed=1, dtype=dtype)
    assert_rounded_once(hadamard(x), x.double() @ exact_sylvester(width) * width**-0.5)


def test_order_is_natural() -> None:
    """Row 1 alternates, row 64 is the half-and-half pattern; a sequency order would differ."""
    unit = torch.eye(128)
    assert torch.equal(hadamard(unit[1]).sign(), torch.tensor([1.0, -1.0] * 64))
    assert torch.equal(hadamard(unit[64]).sign(), torch.tensor([1.0] * 64 + [-1.0] * 64))


def test_is_its_own_inverse() -> None:
    x = normal(5, 128, seed=2)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-6)


def test_spec11_c17_rotating_both_sides_keeps_the_dot_product_and_one_side_does_not() -> None:
    q = normal(1, 128, seed=3)
    k = normal(1, 128, seed=4)
    exact = (q * k).sum()
    assert torch.allclose((hadamard(q) * hadamard(k)).sum(), exact, atol=1e-4)
    assert (hadamard(q) * k).sum() - exact != pytest.approx(0, abs=1.0)
