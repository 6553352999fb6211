"""What is said of a question, by an engine whose answer is known beforehand."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dsv4 import SamplingParams
from dsv4.demo import CHECKPOINT
from dsv4.encoding import Tokenizer
from dsv4.logprobs import TokenLogprobs
from dsv4.run_stats import RunStats
from dsv4.sampling import Sampler
from dsv4.serve.answering import Answering, Ended, PromptRead, Question, Said, TokenSaid
from dsv4.serve.sequences import SavedSequences

PROMPT = [1, 2, 3]
TOKENIZER = Tokenizer(CHECKPOINT)
SAID = TOKENIZER.encode("one two")


class Speaker:
    """An engine that says ``tokens`` and has two of the prompt."""

    def __init__(self, tokens: Sequence[int], finish_reason: Any = "length") -> None:
        self.token_ids: list[int] = []
        self.last_run = RunStats(1, 0.0, len(tokens), 0.0, finish_reason)
        self.asked: tuple[object, ...] = ()
        self.closed = False
        self._tokens = tokens

    def reusable_tokens(self, token_ids: Sequence[int]) -> int:
        return len(token_ids) - 1

    def prompt_logprobs(
        self, token_ids: list[int], count: int, progress: Callable[[int, int], None]
    ) -> list[TokenLogprobs]:
        progress(1, 1)
        return [TokenLogprobs(token, -1.0, ((5, -0.5),) * count) for token in token_ids[1:]]

    def generate(
        self,
        token_ids: list[int],
        most: int,
        sampler: Sampler,
        ends: frozenset[int],
        progress: Callable[[int, int], None],
        reuse: bool,
    ) -> Iterator[int]:
        self.asked = (token_ids, most, ends, reuse)
        progress(1, 1)
        try:
            for token in self._tokens:
                if sampler.params.logprobs is not None:
                    sampler.add(TokenLogprobs(token, -0.25, ()))
                yield token
        finally:
            self.closed = True


def question(**fields: Any) -> Question:
    given = {"max_tokens": 9, "sampling": SamplingParams(), "stops": (), **fields}
    return Question(PROMPT, stop_token_ids=frozenset((7,)), **given)


def answering(engine: Speaker) -> Answering:
    sequences = SavedSequences(engine, None, 1)  # type: ignore[arg-type]
    return Answering(engine, TOKENIZER, sequences)  # type: ignore[arg-type]


def answer(engine: Speaker, **fields: Any) -> list[Said]:
    return list(answering(engine).answer(question(**fields), lambda: None))


@pytest.mark.parametrize(
    ("finish_reason", "by"), [("stop", "eos"), ("length", "length"), ("context", "length")]
)
def test_the_end_of_the_engine_is_that_of_the_answer(finish_reason: str, by: str) -> None:
    engine = Speaker(SAID, finish_reason)
    read, *said, end = answer(engine)
    assert (read, end) == (PromptRead(2), Ended("", by))
    assert said == [TokenSaid(token, TOKENIZER.decode([token]), None) for token in SAID]
    assert engine.asked == (PROMPT, 9, {7}, True)


def test_a_stop_string_ends_the_answer_and_the_engine() -> None:
    engine = Speaker([*SAID, *SAID], "interrupted")
    *said, end = answer(engine, stops=("one",))
    assert [one.token_id for one in said[1:]] == SAID[: len(said) - 1]  # type: ignore[union-attr]
    assert "".join(one.text for one in said[1:]) == ""  # type: ignore[union-attr]
    assert (end, engine.closed) == (Ended("", "stop"), True)


def test_silent_tokens_are_said_without_a_text() -> None:
    end = TOKENIZER.eos_id
    _, first, second, _ = answer(Speaker([end, SAID[0]]), silent_token_ids=frozenset((end,)))
    assert first == TokenSaid(end, "", None)
    assert second == TokenSaid(SAID[0], TOKENIZER.decode(SAID[:1]), None)


def test_half_a_character_is_said_at_the_end() -> None:
    half = TOKENIZER.encode("🦆")[:1]
    assert answer(Speaker(half))[1:] == [TokenSaid(half[0], "", None), Ended("\ufffd", "length")]


def test_every_token_has_its_own_log_probabilities() -> None:
    _, *said, _ = answer(Speaker(SAID), sampling=SamplingParams(logprobs=0))
    assert [one.logprobs for one in said] == [  # type: ignore[union-attr]
        TokenLogprobs(token, -0.25, ()) for token in SAID
    ]


def test_a_prompt_that_is_scored_alone_has_no_answer() -> None:
    sampling = SamplingParams(logprobs=2)
    [read, end] = answer(Speaker(SAID), max_tokens=0, scores_prompt=True, sampling=sampling)
    assert isinstance(read, PromptRead)
    assert (read.reused, end) == (0, Ended("", "length"))
    found = [(one.token_id, len(one.top)) for one in read.logprobs]
    assert found == [(token, 2) for token in PROMPT[1:]]


@pytest.mark.parametrize(("checks", "tokens"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_who_does_not_wait_any_more_is_asked_before_every_token(checks: int, tokens: int) -> None:
    """Before the prompt, while it is read, and behind every token."""
    engine = Speaker([*SAID, *SAID])
    left = [None] * checks

    def check() -> None:
        if not left:
            raise TimeoutError
        left.pop()

    said: list[Said] = []
    with pytest.raises(TimeoutError):
        said.extend(answering(engine).answer(question(), check))
    assert len([one for one in said if isinstance(one, TokenSaid)]) == tokens
    assert engine.closed == (tokens > 0)
