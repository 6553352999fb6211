"""What ``Engine.generate`` is asked for, and the run of tokens that it becomes."""

import time
from collections.abc import Generator, Iterable, Set
from dataclasses import dataclass
from itertools import chain

from dsv4.config import ModelConfig
from dsv4.errors import UserError, shorten
from dsv4.layers.values import Watch
from dsv4.progress import Progress, check_functions
from dsv4.run_stats import DraftStats, FinishReason, RunStats
from dsv4.sampling import Sampler, SamplingParams
from dsv4.token_ids import check_ids, check_integer

USED_OTHERWISE = "the engine was used for something else meanwhile, which ended this sequence"


@dataclass(frozen=True)
class Request:
    """The checked arguments of ``Engine.generate``. ``progress(done, total)``: of the prompt."""

    token_ids: list[int]
    max_new_tokens: int
    sampler: Sampler
    stops: frozenset[int]
    progress: Progress | None

    @classmethod
    def checked(
        cls,
        config: ModelConfig,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: SamplingParams | Sampler | None,
        stop_token_ids: Iterable[int] | None,
        progress: Progress | None,
    ) -> "Request":
        """``token_ids`` are checked already. ``sampling`` and ``stop_token_ids`` None: the model's
        own. Raises ``UserError``.
        """
        stops = config.eos_token_ids if stop_token_ids is None else stop_token_ids
        in_any_order = list(stops) if isinstance(stops, Set) else stops
        if not isinstance(sampling, Sampler):
            sampling = Sampler(SamplingParams() if sampling is None else sampling)
        check_functions(prefill_progress=progress)
        return cls(
            token_ids,
            check_integer("max_new_tokens", max_new_tokens, 1),
            sampling,
            frozenset(check_ids(in_any_order, config.vocab_size, "stop_token_ids", at_least=0)),
            progress,
        )

    def most_steps(self, max_context: int) -> int:
        """Decode steps until the limit or the context's end: the first token needs none."""
        return min(self.max_new_tokens - 1, max_context - len(self.token_ids))


def check_watch(watch: object) -> None:
    """Raises ``UserError`` for what ``Engine.generate`` cannot show values to."""
    if watch is not None and not isinstance(watch, Watch):
        raise UserError(f"watch: found {shorten(watch)}, expected a Watch or None")


class Run:
    """Tokens that an engine is giving out."""

    def __init__(
        self,
        request: Request,
        prefill_seconds: float,
        first: int,
        following: Generator[int, None, None],
        reused_tokens: int = 0,
    ) -> None:
        """``first`` comes of the prompt, of which ``reused_tokens`` were there already,
        ``following`` of one decode step each.
        """
        self._request = request
        self._prefill_seconds = prefill_seconds
        self._prefilled = time.perf_counter()
        self._first = first
        self._following = following
        self._reused_tokens = reused_tokens
        self._reason: FinishReason = "interrupted"
        self._given = 0
        self._ended = False

    def tokens(self) -> Generator[int, None, None]:
        """Yields tokens up to a stop token. Raises ``RuntimeError`` behind ``end``."""
        for token in chain((self._first,), self._following):
            if token in self._request.stops:
                self._reason = "stop"
                return
            self._given += 1
            yield token
            if self._ended:
                raise RuntimeError(USED_OTHERWISE)
        self._reason = "length" if self._given == self._request.max_new_tokens else "context"

    def end(self) -> None:
        """Takes back the steps that were queued ahead: the engine is wanted for something else."""
        self._following.close()
        self._ended = True

    def stats(self, position: int, drafts: DraftStats | None = None) -> RunStats:
        """How it went, once it has ended at ``position``; ``drafts``: how drafts did."""
        prompt = len(self._request.token_ids)
        seconds = time.perf_counter() - self._prefilled
        sampler = self._request.sampler
        logprobs = None if sampler.params.logprobs is None else tuple(sampler.noted[: self._given])
        return RunStats(
            prompt - self._reused_tokens,
            self._prefill_seconds,
            position - prompt,
            seconds,
            self._reason,
            logprobs,
            self._reused_tokens,
            drafts,
        )
