"""Whole steps at temperatures above 0: tokens of many seeds have the main model's distribution."""

import pytest
import torch
from torch import Tensor

from dsv4 import SamplingParams
from dsv4.ops.acceptance import probabilities
from dsv4.sampling import Sampler
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine
from tests.speculative.scripted import NO_STOPS
from tests.speculative.test_acceptance import p_value

SEEDS = 300
GROUPS = 6


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


def grouped(tokens: Tensor) -> Tensor:
    """How often a token of each group was drawn."""
    return (tokens % GROUPS).bincount(minlength=GROUPS).double()


def in_groups(distribution_V: Tensor) -> Tensor:
    """The probability of each group."""
    groups = torch.arange(len(distribution_V)) % GROUPS
    return torch.zeros(GROUPS, dtype=torch.float64).index_add(0, groups, distribution_V)
