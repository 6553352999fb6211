"""Sampling: greedy ties and NaN, the draw's distribution, top-k, top-p and min-p sets, seeded
noise.
"""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops import TORCH, Ops
from dsv4.ops.sampling import NAN_TOKEN, gumbel_noise
from tests.ops.cases import normal, positions


def choose(
    ops: Ops,
    logits_V: Tensor,
    settings: tuple[float, float, float],
    seed: int = 7,
    position: int = 0,
    top_k: int = 0,
) -> Tensor:
    """The token for (temperature, top_p, min_p) and top_k."""
    settings_4 = torch.tensor((*settings, top_k), dtype=torch.float32)
    return ops.sample_token(logits_V, settings_4, torch.tensor([seed]), positions(position))


def greedy(ops: Ops, logits_V: Tensor) -> Tensor:
    return choose(ops, logits_V, (0.0, 1.0, 0.0))


def draws(
    ops: Ops,
    logits_V: Tensor,
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
) -> list[int]:
    settings = temperature, top_p, min_p
    places = range(count)
    return [int(choose(ops, logits_V, settings, position=at, top_k=top_k)) for at in places]


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([math.log(p) for p in probabilities])


def test_greedy_takes_the_lowest_id_of_the_largest_logits(ops: Ops) -> None:
    token = greedy(ops, torch.tensor([1.0, 3.0, 2.0, 3.0]))
    assert (int(token), token.dtype, token.shape) == (1, torch.int64, ())
    tied = torch.full((129_280,), -2.0)
    tied[[70_000, 129_279]] = 5.5
    assert int(greedy(ops, tied)) == 70_000
    assert int(greedy(ops, torch.zeros(129_280))) == 0


def test_greedy_with_infinities(ops: Ops) -> None:
    assert int(greedy(ops, torch.tensor([-torch.inf, -torch.inf, -5.0]))) == 2
    assert int(greedy(ops, torch.tensor([0.0, torch.inf, -torch.inf]))) == NAN_TOKEN
    assert int(greedy(ops, torch.tensor([-torch.inf, -torch.inf]))) == NAN_TOKEN


@pytest.mark.parametrize("index", [0, 3, 4])
def test_nan_gives_the_nan_token(ops: Ops, index: int) -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    logits_V[index] = torch.nan
    for token in (
        greedy(ops, logits_V),
        choose(ops, logits_V, (1.0, 1.0, 0.0), seed=1),
        choose(ops, logits_V, (1.0, 0.5, 0.1), seed=1),
    ):
        assert (int(token), token.dtype) == (NAN_TOKEN, torch.int64)


@pytest.mark.parametrize("logits", [[0.0, torch.inf, 1.0], [-torch.inf] * 3])
def test_a_draw_without_a_distribution_gives_the_nan_token(ops: Ops, logits: list[float]) -> None:
    """Not token 0, which is the beginning-of-sequence token."""
    assert int(choose(ops, torch.tensor(logits), (1.0, 1.0, 0.0), seed=1)) == NAN_TOKEN


def test_impossible_tokens_are_never_drawn(ops: Ops) -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.5, -torch.inf])
    assert set(draws(ops, logits_V, 100)) == {1, 3}


@pytest.mark.slow
def test_draws_follow_the_softmax(ops: Ops) -> None:
    """χ² over 6 tokens, 5 degrees of freedom: 20.5 is exceeded for one seed in a thousand."""
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5])
    temperature = 1.3
    count = 3000
    probability = torch.softmax(logits_V.double() / temperature, 0).tolist()
    found = draws(ops, logits_V, count, temperature)
    chi_square = sum(
        (found.count(v) - count * p) ** 2 / (count * p) for v, p in enumerate(probability)
    )
    assert chi_square < 20.5


@pytest.mark.slow
def test_restricted_draws_keep_the_proportions(ops: Ops) -> None:
    """Top-p 0.8 of (0.5, 0.3, 0.15, 0.05) leaves 5 : 3."""
    found = draws(ops, logits_of(0.5, 0.3, 0.15, 0.05), 2000, top_p=0.79)
    assert set(found) == {0, 1}
    assert found.count(0) / 2000 == pytest.approx(5 / 8, abs=0.035)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {2}),
        (0.49, {2}),
        (0.51, {2, 0}),
        (0.79, {2, 0}),
        (0.81, {2, 0, 3}),
        (0.999, {2, 0, 3, 1}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    ops: Ops, top_p: float, kept: set[int]
) -> None:
    assert set(draws(ops, logits_of(0.3, 0.05, 0.5, 0.15), 150, top_p=top_p)) == kept


def test_top_p_ties_keep_the_lowest_ids(ops: Ops) -> None:
    """Four tokens of probability 1/4: two of them reach 0.5, three reach a little more."""
    assert set(draws(ops, torch.zeros(4), 100, top_p=0.5)) == {0, 1}
    assert set(draws(ops, torch.zeros(4), 200, top_p=0.51)) == {0, 1, 2}


def test_top_p_close_to_1_keeps_all_but_the_last(ops: Ops) -> None:
    assert max(draws(ops, torch.zeros(256), 1500)) == 255
    assert max(draws(ops, torch.zeros(256), 1500, top_p=254.5 / 256)) == 254


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.29, {0, 1, 2}), (0.31, {0, 1}), (1.0, {0})]
)
def test_min_p_is_relative_to_the_most_likely_token(ops: Ops, min_p: float, kept: set[int]) -> None:
    assert set(draws(ops, logits_of(0.5, 0.3, 0.15, 0.05), 150, min_p=min_p)) == kept


def test_min_p_keeps_all_that_tie_with_the_largest(ops: Ops) -> None:
    assert set(draws(ops, torch.tensor([2.0, 0.0, 2.0]), 100, min_p=1.0)) == {0, 2}


def test_the_smaller_of_top_p_and_min_p_wins(ops: Ops) -> None:
    logits_V = logits_of(0.5, 0.3, 0.15, 0.05)
    assert set(draws(ops, logits_V, 200, top_p=0.96, min_p=0.5)) == {0, 1}
    assert set(draws(ops, logits_V, 200, top_p=0.6, min_p=0.2)) == {0, 1}


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {2}), (2, {2, 0}), (3, {2, 0, 3}), (4, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_most_likely(ops: Ops, top_k: int, kept: set[int]) -> None:
    assert set(draws(ops, logits_of(0.3, 0.05, 0.5, 0.15), 150, top_k=top_k)) == kept


def test_top_k_ties_keep_the_lowest_ids(ops: Ops) -> None:
    """Exactly k stay, also where more tie with the k-th; both zeros are the same."""
    assert set(draws(ops, torch.tensor([0.0, -0.0, -0.0, 0.0]), 100, top_k=2)) == {0, 1}
    assert set(draws(ops, torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 200, top_k=3)) == {0, 1, 3}


def test_top_k_is_exact_at_any_temperature(ops: Ops) -> None:
    """The logits decide, not probabilities that rounding has made equal."""
    logits_V = torch.tensor([1.0, 1.0 + 2**-23, 1.0 + 2**-22, 0.0])
    assert set(draws(ops, logits_V, 50, temperature=1e6, top_k=2)) == {1, 2}


def test_top_p_counts_what_top_k_has_left(ops: Ops) -> None:
    """Of (0.4, 0.3) the first is 0.57, of all four 0.4: top-p 0.5 needs one, and two without."""
    logits_V = logits_of(0.4, 0.3, 0.2, 0.1)
    assert set(draws(ops, logits_V, 150, top_p=0.5, top_k=2)) == {0}
    assert set(draws(ops, logits_V, 150, top_p=0.5)) == {0, 1}


def test_min_p_restricts_what_top_k_has_left(ops: Ops) -> None:
    logits_V = logits_of(0.4, 0.3, 0.2, 0.1)
    assert set(draws(ops, logits_V, 150, min_p=0.4, top_k=2)) == {0, 1}
    assert set(draws(ops, logits_V, 150, min_p=0.7, top_k=3)) == {0, 1}


def test_top_k_among_impossible_tokens(ops: Ops) -> None:
    logits_V = torch.tensor([-torch.inf, 1.0, -torch.inf, 0.5, -torch.inf])
    assert set(draws(ops, logits_V, 100, top_k=4)) == {1, 3}
    assert int(choose(ops, torch.tensor([0.0, torch.nan, 1.0]), (1.0, 1.0, 0.0), top_k=1)) == -1


def test_temperature_flattens_and_sharpens(ops: Ops) -> None:
    logits_V = torch.tensor([0.0, 1.0])
    hot = draws(ops, logits_V, 500, temperature=50.0)
    cold = draws(ops, logits_V, 500, temperature=0.05)
    assert 0.4 < sum(hot) / 500 < 0.6
    assert set(cold) == {1}


@pytest.mark.parametrize("temperature", [1e-37, 1e-5])
def test_temperatures_close_to_zero_are_greedy_and_not_an_overflow(
    ops: Ops, temperature: float
) -> None:
    assert set(
        draws(ops, torch.tensor([1999.0, 2000.0, -400.0]), 20, temperature, top_p=0.9, min_p=0.1)
    ) == {1}


def test_noise_is_gumbel() -> None:
    noise = torch.cat(
        [gumbel_noise(20_000, 3, positions(position)) for position in range(5)]
    ).double()
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.015)
    assert float(noise.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.015)
    ends = [gumbel_noise(1 << 16, 5, positions(position)) for position in (313, 740)]
    exact = [-math.log(-math.log(end)) for end in (2.0**-25, 1 - 2.0**-25)]
    assert [float(ends[0].min()), float(ends[1].max())] == pytest.approx(exact)


def test_noise_of_neighbouring_positions_and_tokens_is_independent() -> None:
    rows = torch.stack(
        [gumbel_noise(4000, 11, positions(position)) for position in (0, 1, 2, 1 << 20)]
    )
    columns = torch.stack((rows[0, :-1], rows[0, 1:]))
    for correlation in (torch.corrcoef(rows), torch.corrcoef(columns)):
        off_diagonal = correlation - torch.eye(correlation.shape[0])
        assert float(off_diagonal.abs().max()) < 0.06


def test_reproducible_by_seed_and_position(ops: Ops) -> None:
    logits_V = normal(50, seed=1)

    def draw(seed: int, position: int) -> list[int]:
        settings = 1.0, 1.0, 0.0
        places = range(position, position + 20)
        return [int(choose(ops, logits_V, settings, seed, at)) for at in places]

    assert draw(5, 0) == draw(5, 0)
    assert draw(5, 0) != draw(6, 0)
    assert draw(5, 0) != draw(5, 1000)
    assert draw(5, 0) != draw(5 + (1 << 32), 0), "the upper half of the seed matters"
    assert draw(2**63 - 1, 0) != draw(2**31 - 1, 0)


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert torch.equal(
        gumbel_noise(1000, 9, positions(4))[:100], gumbel_noise(100, 9, positions(4))
    )


def test_bfloat16_logits_draw_like_their_float32_values() -> None:
    """Of the torch ops; the kernel takes the float32 logits that the head computes."""
    logits_V = normal(64, seed=2, dtype=torch.bfloat16)
    assert draws(TORCH, logits_V, 20, top_p=0.9) == draws(TORCH, logits_V.float(), 20, top_p=0.9)


def test_greedy_needs_neither_seed_nor_restrictions(ops: Ops) -> None:
    logits_V = normal(500, seed=3)
    tokens = {
        int(choose(ops, logits_V, (0.0, top_p, min_p), seed, position, top_k))
        for top_k in (0, 3)
        for top_p, min_p in ((1.0, 0.0), (0.1, 0.9))
        for seed, position in ((0, 0), (2**63 - 1, 1_000_000))
    }
    assert tokens == {int(logits_V.argmax())}


def test_settings_are_read_when_the_op_runs(ops: Ops) -> None:
    """The same tensors serve every sampler, which is what a captured step needs."""
    logits_V = torch.zeros(1000)
    settings_4 = torch.tensor([1.0, 1.0, 0.0, 0.0])
    seed_1 = torch.tensor([5])
    position_1 = positions(9)

    def token() -> int:
        return int(ops.sample_token(logits_V, settings_4, seed_1, position_1))

    first = token()
    seed_1.fill_(6)
    assert token() != first
    settings_4[0] = 0
    assert token() == 0
    settings_4[0] = 1
    seed_1.fill_(5)
    assert token() == first
