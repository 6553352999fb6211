"""Decoding with drafts and without the host: a step takes its token, its drafts and its place from
the device, the host reads what was kept a step behind.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.channels import naming_lost_words
from dsv4.limits import MAX_TAKEN_BACK
from dsv4.sampling import Sampler, checked_token
from dsv4.speculative.block_ring import AnyBlockRing, Given
from dsv4.speculative.tally import DraftCount, Tally
from dsv4.step.lock_step import AnyFeed, AnySampler

# Steps in the queue, with the one that the host waits for: a step takes longer than queueing one.
BLOCKS_AHEAD = 2


class BlockQueue(Protocol):
    """Queues the pieces of a step, each on the current streams."""

    def draft(self, count: int) -> None:
        """``count`` drafts behind the last token, from 1 on."""
        ...

    def verify(self, tokens: int, end: int) -> None:
        """The main model on so many tokens: the last one and the drafts; the sequence has at most
        ``end`` behind them. Then the choice of what stays of them.
        """
        ...

    def feed(self, tokens: int) -> AnyFeed:
        """The input of a step of so many tokens."""
        ...

    def logits(self, tokens: int) -> Tensor:
        """float32 ``[T, V]`` of the last step of so many tokens."""
        ...

    def alone(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """The ``steps`` tokens that follow ``token``, by the main model alone."""
        ...


class Drafting(NamedTuple):
    """How many drafts the steps of a run have, and what comes of them."""

    count: DraftCount
    tally: Tally


class BlockLoop:
    """Runs steps with drafts again and again."""

    def __init__(
        self,
        state: DecodeState,
        sampler: AnySampler,
        ring: AnyBlockRing,
        max_context: int,
        pass_on_rejected: Callable[[], None],
    ) -> None:
        """``max_context``: tokens that the caches hold. ``pass_on_rejected`` queues the head's
        number of rejected tokens to the other devices.
        """
        assert state.draft is not None
        self._state = state
        self._draft = state.draft
        self._sampler = sampler
        self._ring = ring
        self._max_context = max_context
        self._count = DraftCount((0,))
        self._pass_on_rejected = pass_on_rejected
        self._pending: deque[int] = deque()
        # Tokens of the step that is being queued.
        self._entering = 0
        # Drafts of the step that is queued next; None: that is not decided yet.
        self._next: int | None = None
        self._known = 0
        self._stop = 0

    @torch.inference_mode()
    def generate(
        self, token: int, sampler: Sampler, steps: int, queue: BlockQueue, drafting: Drafting
    ) -> Generator[int, None, None]:
        """Yields the ``steps`` tokens that follow ``token``, several for each step of which drafts
        stay; fewer where drafts are to rest (``DraftCount.rest``).

        What was queued in vain, because the caller closed the generator or drafts rest, is taken
        back, with the NaN that it met. Raises ``FloatingPointError`` for NaN logits that are not a
        draft's.
        """
        state = self._state
        start = state.position
        self._known = start
        self._stop = start + steps
        self._count = drafting.count
        # Where an error leaves the sequence: behind the token that met it.
        kept = start
        given = 0
        noted = sampler.params.logprobs is not None
        self._sampler.load(sampler)
        queue.feed(1).put([token])
        try:
            while given < steps and not self._rests():
                kept = start + given + 1
                self._fill(queue, 1 if noted else BLOCKS_AHEAD)
                tokens = self._pending[0]
                block = self._read()
                if not block.tokens:
                    # A draft may have brought NaN or infinity: the token alone decides.
                    self._restart(queue, token)
                    continue
                accepted = len(block.tokens) - 1
                # The last step may give more than is asked for.
                wanted = block.tokens[: steps - given]
                drafting.tally.add(block.drafted, accepted, len(wanted), block.seconds)
                self._count.add(block.drafted, accepted, sum(block.seconds))
                for row, chosen in enumerate(wanted):
                    kept = start + given + 1
                    token = checked_token(chosen, start + given + 1)
                    if noted:
                        logits_V = queue.logits(tokens)[row]
                        sampler.note(logits_V, _scalar(token, logits_V.device))
                    given += 1
                    yield token
        finally:
            is_in_vain = bool(self._pending) and kept == start + given
            self._forget()
            state.set_position(min(kept, state.position))
            if is_in_vain:
                # The steps of the tokens that were given have met none.
                state.forget_nan()

    def _rests(self) -> bool:
        return self._count.rest(self._draft.stages[0].window) > 0

    def _fill(self, queue: BlockQueue, ahead: int) -> None:
        """Queues steps until ``ahead`` are, as far as it is known what the next one is. What it is
        goes by what was known when it could be queued first, however many are, and however many
        tokens are asked for: a text begins as one with more of them.
        """
        while len(self._pending) < BLOCKS_AHEAD:
            if self._next is None:
                self._next = self._next_count()
            if self._next is None or len(self._pending) == ahead:
                return
            # Where all that is queued stays, no more may be asked for.
            if self._known + sum(self._pending) >= self._stop:
                return
            count = self._next
            self._next = None
            self._put(queue, count)

    def _next_count(self) -> int | None:
        """Drafts of the next step; None until what is queued is read."""
        queued = sum(self._pending)
        wanted = self._count.now
        has_room = self._known + queued + wanted < self._max_context
        is_known = self._draft.covers(self._known)
        if self._pending:
            is_sure = has_room and is_known
            # Behind drafts that bring NaN the next step begins where they did, and another one than
            # the same again would be read in the place of theirs.
            is_sure = is_sure and self._pending[-1] in (1, wanted + 1)
            # The caller may stop behind the first token of the step that is read next.
            return wanted if is_sure and queued + wanted <= MAX_TAKEN_BACK else None
        # As many as ever at the end of a run: its last tokens are those of a longer one.
        return wanted if is_known and has_room else 0

    def _put(self, queue: BlockQueue, count: int) -> None:
        """Queues a step, from its drafts to the way of what stays to the other devices."""
        tokens = count + 1
        self._entering = tokens
        self._ring.begin()
        if count:
            queue.draft(count)
        self._ring.mark_drafted()
        queue.feed(tokens).pass_on()
        queue.verify(tokens, self._known + sum(self._pending) + tokens)
        self._ring.mark_settled()
        self._pass_on_rejected()
        self._pending.append(tokens)
        self._entering = 0
        if len(self._pending) == 1:
            self._count_begun()

    def _read(self) -> Given:
        """Waits for the oldest step."""
        with naming_lost_words(self._state.channels):
            block = self._ring.read(self._known)
        self._pending.popleft()
        self._known += len(block.tokens)
        self._state.position = self._known
        if self._pending:
            self._count_begun()
        return block

    def _restart(self, queue: BlockQueue, token: int) -> None:
        """Goes on behind ``token``, by itself."""
        self._forget()
        self._state.set_position(self._known)
        self._state.forget_nan()
        queue.feed(1).put([token])
        self._next = 0

    def _forget(self) -> None:
        """Nobody reads what is queued."""
        state = self._state
        if self._pending:
            state.position = self._known + self._pending[0]
        # Steps whose beginning is not known write as far as if all before them stayed.
        queued = sum(self._pending) + self._entering
        state.furthest = max(state.furthest, self._known + queued)
        self._pending.clear()
        self._entering = 0
        self._next = None
        self._ring.forget()

    def _count_begun(self) -> None:
        """The oldest step is known to begin at ``_known``."""
        state = self._state
        tokens = self._pending[0]
        self._draft.begin(self._known, tokens)
        state.furthest = max(state.furthest, self._known + tokens)


def _scalar(token: int, device: torch.device) -> Tensor:
    return torch.tensor(token, dtype=torch.int64, device=device)
