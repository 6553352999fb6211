"""Decoding without the host: a step takes its token from the device, the host reads tokens several
steps behind.
"""

from collections.abc import Callable, Generator

import torch

from dsv4.caches.state import DecodeState
from dsv4.channels import naming_lost_words
from dsv4.limits import STEPS_AHEAD
from dsv4.sampling import Sampler, checked_token
from dsv4.step.lock_step import AnyFeed, AnyRing, AnySampler, AnyStep
from dsv4.step.token_ring import LogprobRing


class TokenLoop:
    """Runs a step of one token again and again."""

    def __init__(
        self, step: AnyStep, state: DecodeState, sampler: AnySampler, ring: AnyRing
    ) -> None:
        assert step.feed is not None
        self._step = step
        self._feed: AnyFeed = step.feed
        self._state = state
        self._sampler = sampler
        self._ring = ring

    @torch.inference_mode()
    def generate(
        self, token: int, sampler: Sampler, steps: int, queue: Callable[[int], None]
    ) -> Generator[int, None, None]:
        """Yields the tokens that follow ``token``, one step each.

        ``queue``, which is told how many tokens the sequence then has, queues the step and its
        choice of a token. The host stays up to four steps behind. Steps that were queued in vain,
        because the caller closed the generator, are taken back, with the NaN that they met. Raises
        ``FloatingPointError`` for NaN logits.
        """
        start = self._state.position
        queued = 0
        read = 0
        # Tokens that are known to be sound.
        given = 0
        logprobs: LogprobRing | None = None
        if sampler.params.logprobs is not None:
            logprobs = LogprobRing(sampler.params.logprobs, self._step.logits_TV)
        self._sampler.load(sampler)
        self._feed.put([token])
        try:
            while read < steps:
                while queued < min(steps, read + STEPS_AHEAD):
                    self._put(queue, logprobs)
                    queued += 1
                read += 1
                with naming_lost_words(self._state.channels):
                    stored = self._ring.read(start + read)
                token = checked_token(stored, start + read)
                if logprobs is not None:
                    sampler.add(logprobs.read(start + read))
                given = read
                yield token
        finally:
            self._state.set_position(start + read)
            if given == read < queued:
                # The steps of the tokens that were given have met none.
                self._state.forget_nan()

    def _put(self, queue: Callable[[int], None], logprobs: LogprobRing | None) -> None:
        """Queues a step, the choice of its token, and the way of that token to the host and to
        every device.
        """
        queue(self._state.position + 1)
        self._state.advance(1)
        if logprobs is not None:
            logprobs.store(self._state.position, self._step.logits_TV[-1], self._step.token)
        self._ring.mark(self._state.position)
        self._feed.pass_on()
