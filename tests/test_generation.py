"""Requests and runs without an engine: defaults, reasons, and what the statistics count."""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4 import ModelConfig, SamplingParams, UserError, generation
from dsv4.generation import Request, Run
from dsv4.sampling import Sampler
from tests.model.tiny import small_config

CONFIG = ModelConfig.from_dict(small_config(eos_token_id=[1, 5]))
PROMPT = [3, 4, 6]


def request(most: int = 4, sampling: Any = None, stops: Any = None) -> Request:
    return Request.checked(CONFIG, PROMPT, most, sampling, stops, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def tokens(*ids: int) -> Generator[int, None, None]:
    yield from ids


def test_what_nobody_says_is_the_models_own_and_the_default() -> None:
    asked = request()
    assert asked.sampler.params == SamplingParams()
    assert asked.stops == {1, 5}
    assert request(stops=[]).stops == frozenset()
    own = Sampler(SamplingParams(seed=7))
    assert request(sampling=own).sampler is own
    assert request(sampling=own.params).sampler.params is own.params
    assert request(1).max_new_tokens == 1


def test_only_none_is_the_default_sampling() -> None:
    with pytest.raises(UserError, match=r"sampling: found \{\}, expected SamplingParams"):
        request(sampling={})


def test_the_first_token_needs_no_step_and_the_last_position_is_used() -> None:
    assert [request(most).most_steps(64) for most in (1, 2, 60)] == [0, 1, 59]
    assert [request(60).most_steps(room) for room in (3, 4, 62, 63)] == [0, 1, 59, 59]


@pytest.mark.parametrize(
    ("ids", "given", "reason"),
    [
        ([5], [], "stop"),
        ([7, 8, 1, 9], [7, 8], "stop"),
        ([7, 8, 9, 2], [7, 8, 9, 2], "length"),
        ([7, 8, 9], [7, 8, 9], "context"),
    ],
)
def test_a_run_says_why_it_ended(ids: list[int], given: list[int], reason: str) -> None:
    run = Run(request(), 0.0, ids[0], tokens(*ids[1:]))
    assert run.stats(3).finish_reason == "interrupted"
    assert list(run.tokens()) == given
    assert run.stats(3).finish_reason == reason


def test_prefill_and_decode_have_seconds_of_their_own(clock: SimpleNamespace) -> None:
    run = Run(request(), 2.5, 7, tokens(8, 9))
    clock.now += 4
    found = run.stats(6)
    assert (found.prefill_tokens, found.prefill_seconds) == (3, 2.5)
    assert (found.decode_tokens, found.decode_seconds) == (3, 4.0)
    assert (found.reused_tokens, found.logprobs, found.drafts) == (0, None, None)


def test_reused_tokens_are_no_prefilled_ones() -> None:
    found = Run(request(), 0.0, 7, tokens(), 2).stats(3)
    assert (found.prefill_tokens, found.reused_tokens, found.decode_tokens) == (1, 2, 0)
