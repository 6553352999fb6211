"""Sampling ops: greedy ties and NaN, the distribution of the draw, top-p and min-p sets, the seeded noise."""

import math

import torch
from torch import Tensor

from dsv4.ops import Ops
from dsv4.ops.sampling import NAN_TOKEN, gumbel_noise
from tests.ops.cases import normal, positions


def draws(ops: Ops, logits_V: Tensor, count: int, temperature: float = 1.0, top_p: float = 1.0, min_p: float = 0.0):
    return [
        int(ops.sample_token(logits_V, temperature, top_p, min_p, 7, positions(position))) for position in range(count)
    ]


def test_greedy_takes_the_lowest_id_of_the_largest_logits(ops: Ops) -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert int(ops.argmax_token(logits_V)) == 1
    assert ops.argmax_token(logits_V).dtype == torch.int64


def test_nan_gives_the_nan_token(ops: Ops) -> None:
    for index in (0, 4):
        logits_V = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
        logits_V[index] = torch.nan
        assert int(ops.argmax_token(logits_V)) == NAN_TOKEN
        assert int(ops.sample_token(logits_V, 1.0, 1.0, 0.0, 1, positions(0))) == NAN_TOKEN


def test_draws_follow_the_softmax(ops: Ops) -> None:
    """χ² over 6 tokens, 5 degrees of freedom: 20.5 is exceeded once in a thousand draws of the seed."""
    logits_V, temperature, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5]), 1.3, 3000
    probability = torch.softmax(logits_V.double() / temperature, 0).tolist()
    found = draws(ops, logits_V, count, temperature)
    chi_square = sum((found.count(v) - count * p) ** 2 / (count * p) for v, p in enumerate(probability))
    assert chi_square < 20.5


def test_noise_is_gumbel() -> None:
    noise = torch.cat([gumbel_noise(20_000, 3, positions(position)) for position in range(5)]).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.015
    assert abs(float(noise.std()) - math.pi / math.sqrt(6)) < 0.015


def test_reproducible_by_seed_and_position(ops: Ops) -> None:
    logits_V = normal(50, seed=1)

    def draw(seed: int, position: int) -> list[int]:
        return [int(ops.sample_token(logits_V, 1.0, 1.0, 0.0, seed, positions(position + i))) for i in range(20)]

    assert draw(5, 0) == draw(5, 0)
    assert draw(5, 0) != draw(6, 0)
    assert draw(5, 0) != draw(5, 1000)
    assert draw(5, 0) != draw(5 + (1 << 32), 0), "the upper half of the seed matters"
