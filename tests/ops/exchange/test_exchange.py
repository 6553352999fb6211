"""Sums over ranks: their order and their one rounding; and what the ops of a lone rank are."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops import TORCH
from dsv4.ops.exchange import sum_ranks
from dsv4.weights.quant import QuantFormat
from dsv4.weights.quantize import quantize
from tests.ops.cases import OpsUnderTest, normal


def column(*values: float) -> list[Tensor]:
    """One number of every rank."""
    return [torch.tensor([[value]], dtype=torch.float32) for value in values]


def test_ranks_are_added_in_their_order() -> None:
    """Of these numbers float32 gives another sum when the last two are exchanged."""
    assert sum_ranks(column(1e8, -1e8, 1.0), torch.float32).item() == 1
    assert sum_ranks(column(1e8, 1.0, -1e8), torch.float32).item() == 0


def test_the_sum_is_rounded_once() -> None:
    """Rounded in between, each of the small parts would be lost."""
    parts = column(1.0, 2.0**-9, 2.0**-9, 2.0**-9)
    total = sum_ranks(parts, torch.bfloat16)
    assert total.dtype == torch.bfloat16
    assert total.item() == 1 + 2.0**-7
    assert sum_ranks(parts, torch.float32).item() == 1 + 3 * 2.0**-9


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((-0.0, -0.0), -0.0),
        ((-0.0, 0.0), 0.0),
        ((0.0, -0.0), 0.0),
        ((math.inf, 1.0), math.inf),
        ((-math.inf, 3e38), -math.inf),
        ((math.inf, -math.inf), math.nan),
        ((math.nan, 1.0), math.nan),
        ((1.0, math.nan), math.nan),
        ((3e38, 3e38), math.inf),
    ],
)
def test_any_value_of_a_part_is_legal(parts: tuple[float, ...], expected: float) -> None:
    total = sum_ranks(column(*parts), torch.bfloat16).item()
    assert math.isnan(total) == math.isnan(expected)
    if not math.isnan(expected):
        assert (total, math.copysign(1, total)) == (expected, math.copysign(1, expected))


def test_a_lone_rank_has_its_own_part() -> None:
    (part,) = column(1 + 2.0**-9)
    assert sum_ranks([part], torch.bfloat16).item() == 1


def test_products_of_a_lone_rank_are_whole(ops: OpsUnderTest, dtype: torch.dtype) -> None:
    """What ``linear`` gives: rounded to the dtype of x, or logits of the whole vocabulary."""
    weight = ops.pack_weight(quantize(normal(160, 192, seed=1, scale=0.1), QuantFormat.NVFP4))
    x_TK = normal(5, 192, seed=2, dtype=dtype)
    y_TE = ops.row_parallel_linear(x_TK, weight)
    assert torch.equal(y_TE, ops.linear(x_TK, weight))
    assert y_TE.dtype == dtype
    assert ops.summed(y_TE) is y_TE
    logits_TV = ops.vocab_parallel_linear(x_TK, weight)
    assert torch.equal(logits_TV, ops.linear(x_TK, weight, torch.float32))
    assert ops.gather_logits(logits_TV) is logits_TV


def test_sums_of_row_parallel_parts_are_the_whole_product() -> None:
    """Columns of W with the same columns of x, one part by rank."""
    weight = normal(32, 64, seed=3)
    x_TK = normal(3, 64, seed=4)
    whole = quantize(weight, QuantFormat.BF16)
    parts = []
    for rank in range(4):
        columns = slice(16 * rank, 16 * rank + 16)
        part = quantize(weight[:, columns], QuantFormat.BF16)
        parts.append(TORCH.linear(x_TK[:, columns], part, torch.float32))
    expected = TORCH.row_parallel_linear(x_TK, whole)
    torch.testing.assert_close(sum_ranks(parts, torch.float32), expected, rtol=1e-5, atol=1e-5)
