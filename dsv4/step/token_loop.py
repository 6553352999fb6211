"""Decoding without the host: a step takes its token from the device, the host reads tokens several
steps behind.
"""

from collections.abc import Callable, Generator

import torch

from dsv4.caches.state import DecodeState
from dsv4.limits import STEPS_AHEAD
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
        self._sampler.load(sampler)
        self._feed.put([token])
        try:
            while read < steps:
                while queued < min(steps, read + STEPS_AHEAD):
                    self._queue(run or self._run, sample or self._step.sample)
                    queued += 1
                read += 1
                yield checked_token(self._ring.read(start + read), start + read)
        finally:
            self._state.set_position(start + read)

    def _queue(self, run: Callable[[], None], sample: Callable[[], None]) -> None:
        """A step, the choice of its token, and the way of that token to the host and to every
        device.
        """
        run()
        self._state.advance(1)
        sample()
        self._ring.mark(self._state.position)
        self._feed.pass_on()

    def _run(self) -> None:
        self._step.run(1)
