"""Drafts of a known text, some of them wrong, in the place of those of a module."""

from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.speculative.drafter import ChooseAt, Drafter, Proposal
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.speculative.models import plain_engine

GREEDY = SamplingParams(temperature=0)
NO_STOPS: frozenset[int] = frozenset()


class Scripted:
    """A drafter that proposes what it is told, while the module runs along."""

    def __init__(self, drafter: Drafter, script: "Script") -> None:
        self.scope = drafter.scope
        self.remember = drafter.remember
        self._drafter = drafter
        self._script = script

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        own = self._drafter.propose(token, position, count, choose)
        tokens = self._script(position, len(own.tokens))
        logits_NV = torch.zeros((len(tokens), 89), dtype=torch.float32)
        return Proposal(tokens, logits_NV)


class Script:
    """Drafts of a known text of which some are wrong: at position p those of ``wrong(p)``."""

    def __init__(self, text: list[int], kept: Any, seed: int = 0) -> None:
        self._text = text
        self._kept = kept
        self._other = torch.Generator().manual_seed(seed)

    def __call__(self, position: int, count: int) -> list[int]:
        right = self._text[position + 1 : position + 1 + count]
        kept = self._kept(position)
        wrong = torch.randint(2, 89, (count,), generator=self._other).tolist()
        return [
            token if slot < kept else (other if other != token else (token + 1) % 89)
            for slot, (token, other) in enumerate(zip(right, wrong, strict=False))
        ]


def scripted(engine: Engine, script: Script) -> Engine:
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    steps.drafter = Scripted(steps.drafter, script)
    return engine


def plain_text(kind: MtpKind, prompt: list[int], count: int, **settings: Any) -> list[int]:
    engine = plain_engine(kind, **settings)
    return list(engine.generate(prompt, count, GREEDY, NO_STOPS))


def assert_tokens_are_noted(
    engine: Engine, ids: list[int], sampling: SamplingParams, tolerance: float
) -> None:
    """Every token with the log-probability that the whole text gives it."""
    noted = SamplingParams(temperature=sampling.temperature, seed=sampling.seed, logprobs=2)
    tokens = list(engine.generate(ids, 16, noted, NO_STOPS))
    assert engine.last_run is not None
    logprobs = engine.last_run.logprobs
    assert logprobs is not None
    logits = engine.logits([*ids, *tokens])[len(ids) - 1 : -1].log_softmax(1)
    for row, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        assert entry.logprob == pytest.approx(float(logits[row, token]), abs=tolerance)
