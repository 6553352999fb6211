"""Log-probabilities: their values, their order, and what a generation says of every token."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams, UserError
from dsv4.logprobs import TokenLogprobs, rank_tokens
from dsv4.sampling import Sampler
from tests.model.tiny import random_ids, tiny_engine

NO_STOP: frozenset[int] = frozenset()


def ranked(logits: Sequence[float], token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs.of(*rank_tokens(torch.tensor(logits), torch.tensor(token), count))


def test_values_are_logarithms_of_probabilities() -> None:
    found = ranked([math.log(p) for p in (0.1, 0.6, 0.3)], 0, 2)
    assert found.token_id == 0
    assert found.logprob == pytest.approx(math.log(0.1))
    assert [token for token, _ in found.top] == [1, 2]
    assert [logprob for _, logprob in found.top] == pytest.approx([math.log(0.6), math.log(0.3)])


def test_ties_come_by_id_and_none_is_a_number_too() -> None:
    assert [token for token, _ in ranked([1.0, 2.0, 1.0, 2.0, 1.0], 4, 4).top] == [1, 3, 0, 2]
    assert ranked([1.0, 2.0], 1, 0).top == ()


def test_logits_of_any_size_are_finite_and_no_token_is_harmless() -> None:
    found = ranked([1e38, 0.0, -1e38], -1, 1)
    assert (found.token_id, found.logprob) == (0, 0.0)


@pytest.mark.parametrize("logits", [[0.0, -math.inf], [0.0, math.inf]])
def test_what_is_no_number_is_not_noted(logits: list[float]) -> None:
    sampler = Sampler(SamplingParams(logprobs=2))
    with pytest.raises(FloatingPointError, match=r"^log-probability of token 0: (-inf|nan)$"):
        sampler.note(torch.tensor(logits), torch.tensor(0))
    assert not sampler.noted


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=8)


def test_a_sampler_notes_every_run_from_its_beginning(engine: Engine) -> None:
    sampler = Sampler(SamplingParams(temperature=0, logprobs=0))
    for seed in (1, 2):
        tokens = list(engine.generate(random_ids(10, seed=seed), 5, sampler, frozenset()))
        run = engine.last_run
        assert run is not None
        assert run.logprobs is not None
        assert [one.token_id for one in run.logprobs] == tokens
        assert tuple(sampler.noted) == run.logprobs


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(3.0, 0.9, seed=2, top_k=40)]
)
def test_generation_notes_the_raw_probabilities_of_what_it_chose(
    engine: Engine, sampling: SamplingParams
) -> None:
    """Those of the teacher-forced logits, whatever temperature and restrictions drew from."""
    prompt = random_ids(10)
    produced = list(engine.generate(prompt, 12, replace(sampling, logprobs=3), NO_STOP))
    assert engine.last_run is not None
    noted = engine.last_run.logprobs
    assert noted is not None
    logprobs_TV = torch.log_softmax(engine.logits(prompt + produced), -1)[len(prompt) - 1 : -1]
    assert [one.token_id for one in noted] == produced
    for one, logprobs_V in zip(noted, logprobs_TV, strict=True):
        assert one.logprob == pytest.approx(float(logprobs_V[one.token_id]), abs=1e-5)
        values, ids = logprobs_V.topk(3)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_tokens_are_the_same_and_entries_are_those_of_the_yielded(engine: Engine) -> None:
    """A stop token and tokens behind a closed generator have no entry."""
    greedy = SamplingParams(temperature=0)
    noting = SamplingParams(temperature=0, logprobs=0)
    free = list(engine.generate(random_ids(10), 12, greedy, NO_STOP))
    assert engine.last_run is not None
    assert engine.last_run.logprobs is None
    stopped = list(engine.generate(random_ids(10), 12, noting, [free[4]]))
    assert stopped == free[: free.index(free[4])]
    assert [one.token_id for one in engine.last_run.logprobs or ()] == stopped
    tokens = engine.generate(random_ids(10), 12, noting, NO_STOP)
    taken = [next(tokens), next(tokens)]
    tokens.close()
    assert [one.token_id for one in engine.last_run.logprobs or ()] == taken == free[:2]


def test_no_more_alternatives_than_tokens(engine: Engine) -> None:
    list(engine.generate([1], 3, SamplingParams(logprobs=1000), NO_STOP))
    assert engine.last_run is not None
    vocabulary = engine.config.vocab_size
    assert [len(one.top) for one in engine.last_run.logprobs or ()] == [vocabulary] * 3


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 21])
def test_a_prompt_is_ranked_as_its_logits_say(engine: Engine, tokens: int) -> None:
    """Across chunks of 8 and rows of 8; the sequence stands behind the prompt afterwards."""
    prompt = random_ids(tokens)
    told = []
    found = engine.prompt_logprobs(prompt, 3, lambda *done: told.append(done))
    assert (engine.token_ids, engine.position) == (prompt, tokens)
    assert told[-1] == (tokens, tokens)
    logits_TV = engine.logits(prompt)[:-1]
    for token, one, logits_V in zip(prompt[1:], found, logits_TV, strict=True):
        expected = ranked(logits_V.tolist(), token, 3)
        assert (one.token_id, [top for top, _ in one.top]) == (
            token,
            [top for top, _ in expected.top],
        )
        assert one.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert one.top[2][1] == pytest.approx(expected.top[2][1], abs=1e-5)


def test_a_long_chunk_of_a_prompt_is_ranked_as_short_ones_are(engine: Engine) -> None:
    """Rows of 8 at a time."""
    prompt = random_ids(21)
    long = tiny_engine(max_context=64, prefill_chunk=64)
    pairs = zip(long.prompt_logprobs(prompt, 1), engine.prompt_logprobs(prompt, 1), strict=True)
    for found, expected in pairs:
        assert found.token_id == expected.token_id
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_what_follows_a_ranked_prompt_is_what_follows_any(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0)
    expected = list(engine.generate(random_ids(20), 6, greedy, NO_STOP))
    engine.prompt_logprobs(random_ids(20), 0)
    assert list(engine.generate(random_ids(20), 6, greedy, NO_STOP, reuse=True)) == expected
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens == 19


def test_a_sampler_of_the_callers_has_an_entry_with_every_token(engine: Engine) -> None:
    sampler = Sampler(SamplingParams(temperature=0, logprobs=1))
    for count, token in enumerate(engine.generate(random_ids(10), 5, sampler, NO_STOP)):
        assert sampler.noted[count].token_id == token


@pytest.mark.parametrize("count", [-1, 1001, 10**6, 1.5, True])
def test_counts_out_of_range_are_refused(count: Any) -> None:
    with pytest.raises(UserError, match=r"^logprobs: found .*, expected an integer from 0 to 1000"):
        SamplingParams(logprobs=count)
