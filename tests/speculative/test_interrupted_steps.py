"""A step that an error or Ctrl-C ends halfway: what was computed of it is never taken for its
tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.ops.row_by_row import row_by_row
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import drafted_engine, plain_engine

GREEDY = SamplingParams(temperature=0)
PROMPT = random_ids(40)


def interrupt_next_step(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second experts of the next step."""
    steps: Any = engine.steps
    moe = steps.ops.moe
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return moe(*arguments, **named)

    ops = replace(steps.ops, moe=interrupted)
    patch.setattr(steps, "ops", ops)
    in_rows = isinstance(steps, DraftedSteps)
    patch.setattr(steps, "_decode_ops", row_by_row(ops) if in_rows else ops)


def generate_interrupted(engine: Engine, behind: int) -> None:
    """Ctrl-C in the step behind so many tokens, 0: in the prompt."""
    with pytest.MonkeyPatch.context() as patch:
        if not behind:
            interrupt_next_step(engine, patch)
        for count, _ in enumerate(engine.generate(PROMPT, 30, GREEDY, (), reuse=True), 1):
            if count == behind:
                interrupt_next_step(engine, patch)


@pytest.mark.parametrize("kind", ["dspark", "classic"])
@pytest.mark.parametrize("make", [plain_engine, drafted_engine])
@pytest.mark.parametrize("behind", [0, 10])
def test_text_behind_an_interrupted_step_is_that_without(
    make: Callable[[str], Engine], kind: str, behind: int
) -> None:
    expected = list(make(kind).generate(PROMPT, 30, GREEDY, ()))
    engine = make(kind)
    with pytest.raises(KeyboardInterrupt):
        generate_interrupted(engine, behind)
    assert len(engine.token_ids) == engine.position
    # With the token whose step was interrupted.
    known = expected[: behind + 1]
    text = list(engine.generate([*PROMPT, *known], 12, GREEDY, (), reuse=True))
    assert text == expected[len(known) : len(known) + 12]
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens == (len(PROMPT) + behind - 1 if behind else 0)


@pytest.mark.parametrize("kind", ["dspark", "classic"])
def test_a_step_that_the_drafter_does_not_remember_is_taken_back(kind: MtpKind) -> None:
    engine = drafted_engine(kind)
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    engine.prefill(PROMPT)
    expected = engine.decode([1, 2])
    engine.rewind(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(steps.drafter), "remember", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode([1, 2])
    assert engine.position == len(PROMPT)
    assert torch.equal(engine.decode([1, 2]), expected)
