"""Distances from exact values are counted in bfloat16 numbers."""

import numpy as np
import pytest
import torch

from tests.ptx.rounding import Rounding, bf16_codes, rounding


def test_bf16_is_rounded_once() -> None:
    # Float32 would round the first to a tie, and the tie to even.
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 2.0**-133 * 1.5, -0.0])
    assert bf16_codes(values).tolist() == [0x3F81, 0x3F80, 0x0002, 0x8000]
    random = np.random.default_rng(0).standard_normal(1000)
    wanted = torch.from_numpy(random).float().bfloat16().view(torch.int16).numpy()
    assert np.array_equal(bf16_codes(random), wanted.view(np.uint16))


def test_rounding_counts_the_numbers_between() -> None:
    exact = np.array([1.0, 1.0, 1.0, 0.0])
    codes = np.array([0x3F80, 0x3F7F, 0x3F83, 0x8000], np.uint16)
    assert rounding(codes, exact) == Rounding(0.5, 0.25, 3)
    assert rounding(np.array([0x8001], np.uint16), np.array([2.0**-133])).worst_ulps == 2
    with pytest.raises(ValueError, match="NaN"):
        rounding(np.array([0x7FC0], np.uint16), np.array([1.0]))
