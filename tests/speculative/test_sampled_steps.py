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
            more, _ = steps._step(tokens[0], sampler, 1)
            tokens += more
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


def grouped(tokens: Tensor) -> Tensor:
    """How often a token of each group was drawn."""
    return (tokens % GROUPS).bincount(minlength=GROUPS).double()


def in_groups(distribution_V: Tensor) -> Tensor:
    """The probability of each group."""
    groups = torch.arange(len(distribution_V)) % GROUPS
    return torch.zeros(GROUPS, dtype=torch.float64).index_add(0, groups, distribution_V)
