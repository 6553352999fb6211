"""Accepting drafts at temperatures above 0: the tokens have the main model's distribution."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops.acceptance import (
    accepted_drafts,
    accepting_seed,
    behind_accepted,
    drawn,
    probabilities,
    remaining_seed,
)
from dsv4.ops.sampling import gumbel_noise, sample_token

VOCABULARY = 7
DRAFTS = 3
DRAWS = 100_000


def distributions(count: int, seed: int, sharpness: float = 1.5) -> Tensor:
    """float64 ``[count, V]``, one token of each without probability."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn((count, VOCABULARY), generator=generator).double()
    logits[torch.arange(count), torch.arange(count) % VOCABULARY] = -torch.inf
    return logits.softmax(1)


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gumbel noise in float64."""
    generator = torch.Generator().manual_seed(seed)
    return -(-torch.rand(shape, generator=generator, dtype=torch.float64).log()).log()


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of a chi-square test; what cannot happen must not have happened."""
    assert int(counts[expected == 0].sum()) == 0
    possible = expected > 0
    wanted = expected[possible] * counts.sum()
    statistic = float(((counts[possible] - wanted).square() / wanted).sum())
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Blocks:
    """Many blocks drafted from q and verified by p, at once."""

    def __init__(self, p_MV: Tensor, q_NV: Tensor, seed: int) -> None:
        q_BNV = q_NV.expand(DRAWS, -1, -1)
        self.drafts_BN = (q_BNV.log() + noise(q_BNV.shape, seed)).argmax(2)
        generator = torch.Generator().manual_seed(seed + 1)
        uniform_BN = torch.rand(self.drafts_BN.shape, generator=generator, dtype=torch.float64)
        p_BMV = p_MV.expand(DRAWS, -1, -1)
        self.accepted_B = accepted_drafts(p_BMV[:, :-1], q_BNV, self.drafts_BN, uniform_BN)
        rest_BV = behind_accepted(p_BMV, q_BNV, self.accepted_B)
        self.next_B = drawn(rest_BV, noise(tuple(rest_BV.shape), seed + 2))

    def tokens_at(self, position: int) -> Tensor:
        """The tokens that blocks give at a position, of those that reach it."""
        found = [self.next_B[self.accepted_B == position]]
        if position < DRAFTS:
            found.append(self.drafts_BN[self.accepted_B > position, position])
        return torch.cat(found)


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_at_every_position_are_those_of_the_main_model(seed: int) -> None:
    p_MV = distributions(DRAFTS + 1, seed)
    q_NV = distributions(DRAFTS, seed + 10)
    blocks = Blocks(p_MV, q_NV, seed)
    for position in range(DRAFTS + 1):
        counts = blocks.tokens_at(position).bincount(minlength=VOCABULARY).double()
        assert counts.sum() > 1000
        assert p_value(counts, p_MV[position]) > 1e-4, position


def test_spec11_j83_drafts_of_another_distribution_than_said_are_noticed() -> None:
    p_MV = distributions(DRAFTS + 1, 0)
    q_NV = distributions(DRAFTS, 10)
    said = Blocks(p_MV, q_NV, 0)
    q_BNV = q_NV.roll(1, dims=1).expand(DRAWS, -1, -1)
    p_BMV = p_MV.expand(DRAWS, -1, -1)
    uniform_BN = torch.rand(said.drafts_BN.shape, generator=torch.Generator().manual_seed(3))
    accepted_B = accepted_drafts(p_BMV[:, :-1], q_BNV, said.drafts_BN, uniform_BN.double())
    rest_BV = behind_accepted(p_BMV, q_BNV, accepted_B)
    next_B = drawn(rest_BV, noise(tuple(rest_BV.shape), 5))
    tokens_B = torch.where(accepted_B > 0, said.drafts_BN[:, 0], next_B)
    counts = tokens_B.bincount(minlength=VOCABULARY).double()
    if int(counts[p_MV[0] == 0].sum()) == 0:
        assert p_value(counts, p_MV[0]) < 1e-12


def test_first_drafts_are_kept_as_often_as_distributions_overlap() -> None:
    p_MV = distributions(DRAFTS + 1, 2)
    q_NV = distributions(DRAFTS, 12)
    kept = float((Blocks(p_MV, q_NV, 2).accepted_B > 0).double().mean())
    overlap = float(torch.minimum(p_MV[0], q_NV[0]).sum())
    assert kept == pytest.approx(overlap, abs=5 * math.sqrt(0.25 / DRAWS))


def test_equal_distributions_keep_everything() -> None:
    p_MV = distributions(DRAFTS + 1, 3)
    assert bool((Blocks(p_MV, p_MV[:-1], 3).accepted_B == DRAFTS).all())


def test_what_the_main_model_cannot_give_is_not_kept() -> None:
    p_111, q_111 = (torch.tensor([[[chance]]], dtype=torch.float64) for chance in (0.0, 0.5))
    drafts_11 = torch.zeros((1, 1), dtype=torch.int64)
    assert int(accepted_drafts(p_111, q_111, drafts_11, torch.zeros_like(p_111[0]))) == 0


def test_a_rejected_draft_of_an_equal_distribution_gives_way_to_that_distribution() -> None:
    p_MV = distributions(DRAFTS + 1, 6)
    rest_BV = behind_accepted(p_MV[None], p_MV[None, :-1], torch.tensor([1]))
    assert torch.equal(rest_BV, p_MV[1:2])


def test_the_noise_of_decisions_does_not_depend_on_that_of_the_drafts() -> None:
    """Noise by position: the drafts' is that of ``sample_token``, that of decisions another."""
    seed = 11
    # Decisions read the noise of token 0, which both can give.
    p_1V, q_1V = (distributions(2, seed)[1:] for seed in (4, 14))
    positions_B1 = torch.arange(DRAWS)[:, None]
    q_BNV, p_BNV = (of.expand(DRAWS, 1, -1) for of in (q_1V, p_1V))
    drafts_BN = drawn(q_BNV[:, 0], gumbel_noise(VOCABULARY, seed, positions_B1))[:, None]
    uniform_BN = (-(-gumbel_noise(1, accepting_seed(seed), positions_B1).double()).exp()).exp()
    accepted_B = accepted_drafts(p_BNV, q_BNV, drafts_BN, uniform_BN)
    rest_BV = behind_accepted(p_BNV.expand(-1, 2, -1), q_BNV, accepted_B)
    next_B = drawn(rest_BV, gumbel_noise(VOCABULARY, remaining_seed(seed), positions_B1))
    tokens_B = torch.where(accepted_B > 0, drafts_BN[:, 0], next_B)
    counts = tokens_B.bincount(minlength=VOCABULARY).double()
    assert p_value(counts, p_1V[0]) > 1e-4


@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p", "top_k"),
    [
        (1.0, 1.0, 0.0, 0),
        (0.5, 1.0, 0.0, 0),
        (1.3, 0.7, 0.0, 0),
        (1.0, 1.0, 0.2, 0),
        (1.0, 1.0, 0.0, 3),
        (2.0, 0.9, 0.1, 5),
        (1.0, 1e-9, 0.0, 0),
    ],
)
def test_probabilities_are_what_sample_token_draws_from(
    temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = 2 * torch.randn((2, VOCABULARY), generator=generator)
    logits_NV[1, 2] = logits_NV[1, 5]
    found_NV = probabilities(logits_NV, temperature, top_p, min_p, top_k)
    assert found_NV.dtype == torch.float64
    settings_4 = torch.tensor([temperature, top_p, min_p, float(top_k)])
    for row, logits_V in enumerate(logits_NV):
        tokens = torch.stack(
            [
                sample_token(logits_V, settings_4, torch.tensor([5]), torch.tensor([position]))
                for position in range(500)
            ]
        )
        counts = tokens.bincount(minlength=VOCABULARY).double()
        assert p_value(counts, found_NV[row]) > 1e-4


@pytest.mark.parametrize(
    ("top_p", "min_p", "top_k", "kept"),
    [(0.5, 0.0, 0, 2), (0.51, 0.0, 0, 3), (1.0, 1.0, 0, 4), (1.0, 0.0, 3, 3), (1.0, 0.0, 4, 4)],
)
def test_restrictions_of_equal_tokens_keep_as_many_as_they_say(
    top_p: float, min_p: float, top_k: int, kept: int
) -> None:
    logits_V = torch.zeros(4)
    found_1V = probabilities(logits_V[None], 1.0, top_p, min_p, top_k)
    assert found_1V[0].tolist() == [1 / kept] * kept + [0.0] * (4 - kept)
    settings_4 = torch.tensor([1.0, top_p, min_p, float(top_k)])
    drawn_ones = {
        int(sample_token(logits_V, settings_4, torch.tensor([5]), torch.tensor([position])))
        for position in range(100)
    }
    assert drawn_ones == set(range(kept))
