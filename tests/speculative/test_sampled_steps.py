"""Whole steps at temperatures above 0: tokens of many seeds have the main model's distribution."""

import pytest
import torch
from torch import Tensor

from dsv4 import SamplingParams
from dsv4.ops.acceptance import accepting_seed, probabilities, remaining_seed
from dsv4.sampling import Sampler
from dsv4.speculative import steps as speculative_steps
from dsv4.speculative.drafter import Proposal
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine
from tests.speculative.scripted import NO_STOPS
from tests.speculative.test_acceptance import p_value

SEEDS = 300
GROUPS = 6


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_tokens_of_many_seeds(kind: MtpKind) -> None:
    """Tokens are counted in groups, so that every one of them is drawn often."""
    ids = random_ids(20)
    engine = drafted_engine(kind)
    engine.prefill(ids)
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    pairs = []
    kept = 0
    for seed in range(SEEDS):
        sampler = Sampler(SamplingParams(temperature=2.0, top_p=0.95, seed=seed))
        tokens, _ = steps._step(7, sampler, 2 if kind == "classic" else 6)
        kept += len(tokens) - 1
        if len(tokens) == 1:
            engine.state.rollback(21)
            logits_V = engine.decode(tokens)[0]
            tokens.append(steps.sample_at(sampler, logits_V, engine.position))
        pairs.append(tokens[:2])
        engine.state.rollback(20)
        engine.state.furthest = 20
    assert kept > SEEDS // 20
    found = torch.tensor(pairs)
    settings = (2.0, 0.95, 0.0, 0)
    first_V = probabilities(engine.decode([7]), *settings)[0]
    second_V = torch.zeros_like(first_V)
    for token in first_V.nonzero().flatten().tolist():
        engine.rewind(engine.position - 21)
        second_V += first_V[token] * probabilities(engine.decode([token]), *settings)[0]
    assert p_value(grouped(found[:, 0]), in_groups(first_V)) > 1e-4
    assert p_value(grouped(found[:, 1]), in_groups(second_V)) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_begins_as_one_with_more_tokens(kind: MtpKind) -> None:
    """The last step of a run drafts as if more were asked for, and the rest is taken back."""
    ids = random_ids(20)
    engine = drafted_engine(kind, draft_tokens=5)
    for seed in range(2):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        text = list(engine.generate(ids, 20, sampling, NO_STOPS))
        for count in (2, 3, 4, 7):
            assert list(engine.generate(ids, count, sampling, NO_STOPS)) == text[:count]
            assert engine.position == len(ids) + count - 1
            assert engine.last_run is not None
            assert engine.last_run.drafts is not None
            assert engine.last_run.drafts.tokens == count - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_drawn_for_its_own_position(kind: MtpKind) -> None:
    """So it has the noise that the main model's draw has there."""
    engine = drafted_engine(kind)
    engine.prefill(random_ids(20))
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    positions: list[int] = []

    def choose(logits_V: Tensor, position: int) -> Tensor:
        positions.append(position)
        return logits_V.argmax()

    with torch.inference_mode():
        steps.drafter.propose(7, 20, 4, choose)
    assert positions == [21, 22, 23, 24]


def test_drafts_are_judged_by_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its position, and what replaces one by noise that decided nothing before."""
    engine = drafted_engine("classic")
    engine.prefill(random_ids(20))
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    asked: list[tuple[int, int]] = []
    noise_at = speculative_steps._noise_at

    def noise(count: int, seed: int, position: int, device: torch.device) -> Tensor:
        asked.append((seed, position))
        return noise_at(count, seed, position, device)

    monkeypatch.setattr(speculative_steps, "_noise_at", noise)
    surer_NV = torch.zeros(3, 89, dtype=torch.float32)
    surer_NV[range(3), [3, 4, 5]] = 9.0
    even_MV = torch.zeros(4, 89, dtype=torch.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5))
    accepted = len(steps._accepted(Proposal([3, 4, 5], surer_NV), even_MV, sampler)) - 1
    assert accepted < 3
    judging = [(accepting_seed(5), position) for position in (17, 18, 19)]
    assert asked == [*judging, (remaining_seed(5), 17 + accepted)]


def grouped(tokens: Tensor) -> Tensor:
    """How often a token of each group was drawn."""
    return (tokens % GROUPS).bincount(minlength=GROUPS).double()


def in_groups(distribution_V: Tensor) -> Tensor:
    """The probability of each group."""
    groups = torch.arange(len(distribution_V)) % GROUPS
    return torch.zeros(GROUPS, dtype=torch.float64).index_add(0, groups, distribution_V)
