"""Points hold the rows of the draft module: behind one are the drafts, and with a seed the text,
that would have come if nothing had been behind it.
"""

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, WINDOW, drafted_engine
from tests.speculative.scripted import GREEDY, NO_STOPS
from tests.speculative.test_states_of_drafts import draft_of

PROMPT = random_ids(40)
# Longer than the rings: nothing that they held is left.
OTHERS = random_ids(100, seed=1)
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def text_of(engine: Engine, prompt: list[int], reused: int) -> tuple[list[int], tuple[int, ...]]:
    """A sampled text, and the drafts that were made for it."""
    text = list(engine.generate(prompt, 10, SAMPLED, NO_STOPS, reuse=True))
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens == reused
    assert engine.last_run.drafts is not None
    return text, engine.last_run.drafts.drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken_back", [0, 1, 8])
def test_a_seed_repeats_its_text_behind_a_point(kind: MtpKind, taken_back: int) -> None:
    place = len(PROMPT) - taken_back
    prompt = [*PROMPT[:place], *OTHERS[:2]]
    straight = drafted_engine(kind)
    straight.prefill(prompt[:place])
    expected = text_of(straight, prompt, place)
    assert expected[1]
    gone = drafted_engine(kind)
    list(gone.generate(PROMPT, 2, GREEDY, NO_STOPS, reuse=True))
    gone.prefill(OTHERS)
    if taken_back == 1:
        # There is a point of its own then, which the prompt's end is too far from.
        list(gone.generate([*PROMPT[:place], *OTHERS[5:20]], 1, GREEDY, NO_STOPS, reuse=True))
        gone.prefill(OTHERS)
    assert text_of(gone, prompt, place) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_point_at_which_rows_were_missing_brings_none(kind: MtpKind) -> None:
    engine = drafted_engine(kind)
    engine.prefill(PROMPT)
    draft_of(engine).forget()
    engine.state.keep_point()
    engine.prefill(OTHERS)
    engine.rewind_to(len(PROMPT))
    known = []
    for token in OTHERS[: WINDOW + 1]:
        engine.decode([token])
        known.append(draft_of(engine).covers(engine.position))
    assert known == [False] * (WINDOW - 1) + [True] * 2
