"""Decoding without the host: a step takes its token from the device, the host reads tokens several
steps behind.
"""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.limits import STEPS_AHEAD
from dsv4.logprobs import TokenLogprobs, rank_tokens
from dsv4.sampling import Sampler, SamplerState, checked_token
from dsv4.step.recorded import RING_TOKENS
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed


class TokenRing:
    """A ring of pinned memory: the device stores the token of position p in slot p mod 16, an event
    tells the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tokens = torch.zeros(RING_TOKENS, dtype=torch.int64, pin_memory=True)
        self._stored = [torch.cuda.Event() for _ in range(RING_TOKENS)]

    def mark(self, position: int) -> None:
        """The store for ``position`` is what was last queued on the device's current stream."""
        self._stored[position % RING_TOKENS].record(torch.cuda.current_stream(self._device))

    def read(self, position: int) -> int:
        """Waits for the token of ``position``, marked at most 16 marks ago."""
        self._stored[position % RING_TOKENS].synchronize()
        return int(self.tokens[position % RING_TOKENS])


class LogprobRing:
    """Log-probabilities beside a token ring: those of position p in slot p mod 16 of pinned memory.
    Who reads them has read the token of the position first.
    """

    def __init__(self, count: int, logits_TV: Tensor) -> None:
        """``count`` alternatives for each token, at most as many as there are logits."""
        self._count = min(count, logits_TV.shape[-1])
        shape = (RING_TOKENS, 1 + self._count)
        pinned = logits_TV.is_cuda
        self._ids = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)

    def store(self, position: int, logits_V: Tensor, token: Tensor) -> None:
        """Queues the ranking and its copies on the current stream of the logits' device."""
        ids_N, logprobs_N = rank_tokens(logits_V, token, self._count)
        self._ids[position % RING_TOKENS].copy_(ids_N, non_blocking=True)
        self._logprobs[position % RING_TOKENS].copy_(logprobs_N, non_blocking=True)

    def read(self, position: int) -> TokenLogprobs:
        """What was stored for ``position``."""
        slot = position % RING_TOKENS
        return TokenLogprobs.of(self._ids[slot], self._logprobs[slot])


class TokenLoop:
    """Runs a step of one token again and again."""

    def __init__(
        self, step: Step, state: DecodeState, sampler: SamplerState, ring: TokenRing
    ) -> None:
        assert step.feed is not None
        self._step = step
        self._feed: TokenFeed = step.feed
        self._state = state
        self._sampler = sampler
        self._ring = ring

    @torch.inference_mode()
    def generate(
        self,
        token: int,
        sampler: Sampler,
        steps: int,
        run: Callable[[], None] | None = None,
        sample: Callable[[], None] | None = None,
    ) -> Generator[int, None, None]:
        """Yields the tokens that follow ``token``, one step each.

        ``run`` and ``sample`` queue the step and its choice of a token; by default the step's own.
        The host stays up to four steps behind. Steps that were queued in vain, because the caller
        closed the generator, are taken back. Raises ``FloatingPointError`` for NaN logits.
        """
        start = self._state.position
        queued = 0
        read = 0
        logprobs: LogprobRing | None = None
        if sampler.params.logprobs is not None:
            logprobs = LogprobRing(sampler.params.logprobs, self._step.logits_TV)
        self._sampler.load(sampler)
        self._feed.put([token])
        try:
            while read < steps:
                while queued < min(steps, read + STEPS_AHEAD):
                    self._queue(run or self._run, sample or self._step.sample, logprobs)
                    queued += 1
                read += 1
                token = checked_token(self._ring.read(start + read), start + read)
                if logprobs is not None:
                    sampler.noted.append(logprobs.read(start + read))
                yield token
        finally:
            self._state.set_position(start + read)

    def _queue(
        self, run: Callable[[], None], sample: Callable[[], None], logprobs: LogprobRing | None
    ) -> None:
        """A step, the choice of its token, and the way of that token to the host and to every
        device.
        """
        run()
        self._state.advance(1)
        sample()
        if logprobs is not None:
            logprobs.store(self._state.position, self._step.logits_TV[-1], self._step.token)
        self._ring.mark(self._state.position)
        self._feed.pass_on()

    def _run(self) -> None:
        self._step.run(1)
