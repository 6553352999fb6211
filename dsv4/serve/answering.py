"""A question to the engine: its prompt read, and the tokens that follow."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from dsv4.cli.stream import TokenText
from dsv4.encoding import Tokenizer
from dsv4.engine import Engine
from dsv4.logprobs import TokenLogprobs
from dsv4.sampling import Sampler, SamplingParams
from dsv4.serve.sequences import SavedSequences
from dsv4.serve.worker import Check


@dataclass(frozen=True)
class Question:
    """A prompt and how to go on with it, checked, so that it can wait.

    ``max_tokens`` 0: nothing follows. ``scores_prompt``: the tokens of the prompt get
    log-probabilities, as many as ``sampling.logprobs`` says. ``forgets``: the next turn of the
    conversation leaves out the reasoning of this one. ``silent_token_ids`` add nothing to the text.
    """

    token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    scores_prompt: bool = False
    forgets: bool = False
    silent_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PromptRead:
    """The engine begins; ``reused`` tokens of the prompt were there. ``logprobs``: of those behind
    the first one.
    """

    reused: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class TokenSaid:
    """A token, the text that it makes certain, and its log-probability where it was asked for."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Ended:
    """The end: ``text`` that was held back, and whether the model came to it by itself (``eos``),
    by a stop string (``stop``), or by a limit (``length``).
    """

    text: str
    by: str


Said = PromptRead | TokenSaid | Ended


class Answering:
    """Questions to one engine, one after another; used in the thread that owns it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, sequences: SavedSequences) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._sequences = sequences

    def answer(self, question: Question, check: Check) -> Iterator[Said]:
        """Raises what ``Engine.generate`` does, and what ``check`` does, between two steps."""
        check()
        engine = self.engine
        ids = question.token_ids
        if question.scores_prompt:
            self._sequences.leave()
            count = question.sampling.logprobs or 0
            yield PromptRead(0, tuple(engine.prompt_logprobs(ids, count, lambda *_: check())))
        else:
            self._sequences.resume(ids, question.forgets)
            yield PromptRead(engine.reusable_tokens(ids))
            if question.forgets:
                self._sequences.keep_prompt(ids, lambda *_: check())
        if question.max_tokens == 0:
            yield Ended("", "length")
            return
        text = TokenText(self._tokenizer, question.stops)
        yield from self._tokens(question, text, check)
        # An unfinished character may be the stop string U+FFFD.
        rest = text.finish()
        by = "stop"
        if text.stop_string is None:
            assert engine.last_run is not None
            by = "eos" if engine.last_run.finish_reason == "stop" else "length"
        yield Ended(rest, by)

    def keep_sequence(self) -> None:
        """Writes the sequence of the engine, at the end of the server."""
        self._sequences.keep()

    def _tokens(self, question: Question, text: TokenText, check: Check) -> Iterator[TokenSaid]:
        sampler = Sampler(question.sampling)
        tokens = self.engine.generate(
            question.token_ids,
            question.max_tokens,
            sampler,
            question.stop_token_ids,
            lambda *_: check(),
            reuse=True,
        )
        with closing(tokens):
            for count, token in enumerate(tokens):
                noted = sampler.noted[count] if sampler.noted else None
                said = "" if token in question.silent_token_ids else text.push(token)
                yield TokenSaid(token, said, noted)
                if text.stop_string is not None:
                    return
                check()
