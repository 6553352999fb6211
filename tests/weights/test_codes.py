"""Codes of scales."""

import torch

from dsv4.weights.codes import ceil_power_of_two_exponent


def test_the_smallest_power_of_two_is_found_from_every_bit() -> None:
    values = torch.tensor([1.0, 1 + 2.0**-23, 1.5, 2.0, 0.75])
    assert ceil_power_of_two_exponent(values).tolist() == [0, 1, 1, 1, 0]
