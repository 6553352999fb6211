"""What counts as the result of the same product, and what does not."""

import pytest
import torch
from torch import Tensor

from dsv4.native.difference import MIXTURE, PRODUCT, difference, different_bits

ROWS = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()


def changed(index: tuple[int, int], value: float) -> Tensor:
    y = ROWS.clone()
    y[index] = value
    return y


def one_ulp_up(y: Tensor, every: int) -> Tensor:
    bits = y.clone().view(torch.int16)
    bits.view(-1)[::every] += 1
    return bits.view(torch.bfloat16)


def test_equal_results_and_a_few_roundings_pass() -> None:
    assert difference(ROWS, ROWS, PRODUCT) is None
    assert difference(one_ulp_up(ROWS, 200), ROWS, PRODUCT) is None
    assert difference(ROWS.float() * (1 + 1e-6), ROWS.float(), PRODUCT) is None
    assert difference(ROWS[:0], ROWS[:0], PRODUCT) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (changed((3, 7), float("nan")), "1 of 32768 values are wrong, at (3, 7) found nan"),
        (changed((63, 511), 0.0), "1 of 32768 values are wrong, at (63, 511) found 0"),
        (ROWS.roll(1, 0), "values are wrong, at (0, 0)"),
        (ROWS * 1.02, "values are wrong"),
        (one_ulp_up(ROWS, 20), "values are rounded apart, expected at most 1%"),
        (ROWS[:, :-1], "found torch.bfloat16 (64, 511), expected torch.bfloat16 (64, 512)"),
        (ROWS.float(), "found torch.float32 (64, 512)"),
    ],
)
def test_wrong_results_are_told(found: Tensor, reason: str) -> None:
    told = difference(found, ROWS, PRODUCT)
    assert told is not None
    assert reason in told


def test_a_lost_row_of_weights_is_seen_in_a_mixture() -> None:
    found = ROWS.clone()
    found[:, 5] = 0
    assert difference(found, ROWS, MIXTURE) is not None


def test_bits_are_compared_one_by_one() -> None:
    assert different_bits(ROWS, ROWS.clone()) is None
    assert different_bits(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    nan = torch.tensor([float("nan")])
    assert different_bits(nan, nan.clone()) is None
    told = different_bits(changed((0, 1), 9.0), ROWS)
    assert told is not None
    assert "the first at 2" in told or "the first at 3" in told
