"""How the host learns what steps with drafts gave: a ring of pinned memory, and events."""

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.peers import naming_missing_words
from dsv4.step.lock_step import check_token


class Given(NamedTuple):
    """What a step gave: tokens, none for NaN among drafts; drafts that it had; seconds of the
    device for drafting and for verifying.
    """

    tokens: list[int]
    drafted: int
    seconds: tuple[float, float]


class _Marks(NamedTuple):
    """Before the drafts, behind them, and behind the choice."""

    begin: torch.cuda.Event
    drafted: torch.cuda.Event
    settled: torch.cuda.Event

    @classmethod
    def make(cls) -> "_Marks":
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(3)))


class BlockRing:
    """``ring_3R`` as ``dsv4.ops.acceptance.settle_block`` writes it, on ``device``."""

    def __init__(self, ring_3R: Tensor, device: torch.device, steps: int) -> None:
        """``steps``: that are marked and not read, at most."""
        self._ring = ring_3R
        self._device = device
        self._marks = tuple(_Marks.make() for _ in range(steps))
        self._free = deque(self._marks)
        self._queued: deque[_Marks] = deque()

    def begin(self) -> None:
        """A step is queued next."""
        self._queued.append(self._free.popleft())
        self._record(self._queued[-1].begin)

    def mark_drafted(self) -> None:
        """Its drafts are queued."""
        self._record(self._queued[-1].drafted)

    def mark_settled(self) -> None:
        """All of it is queued."""
        self._record(self._queued[-1].settled)

    def read(self, position: int) -> Given:
        """Waits for the oldest step that is not read, which began at ``position``."""
        # It stays in the queue meanwhile: an interruption of the wait leaves it to ``forget``.
        marks = self._queued[0]
        marks.settled.synchronize()
        slots = self._ring.shape[1]
        count, drafted = (int(self._ring[row, position % slots]) for row in (1, 2))
        places = range(position + 1, position + 1 + count)
        tokens = [int(self._ring[0, place % slots]) for place in places]
        draft = 1e-3 * marks.begin.elapsed_time(marks.drafted)
        verify = 1e-3 * marks.drafted.elapsed_time(marks.settled)
        self._free.append(self._queued.popleft())
        return Given(tokens, drafted, (draft, verify))

    def forget(self) -> None:
        """Nobody reads what is queued, nor what a signal took from one queue and put into none."""
        self._free = deque(self._marks)
        self._queued.clear()

    def _record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))


class BlockRings:
    """The rings of all ranks, which keep the same tokens unless there is a fault."""

    def __init__(self, ranks: Sequence[BlockRing], fault_4: Tensor) -> None:
        """``fault_4``: as of ``dsv4.step.lock_step.Rings``."""
        self._ranks = ranks
        self._fault_4 = fault_4

    def begin(self) -> None:
        """As of one rank."""
        for ring in self._ranks:
            ring.begin()

    def mark_drafted(self) -> None:
        """As of one rank."""
        for ring in self._ranks:
            ring.mark_drafted()

    def mark_settled(self) -> None:
        """As of one rank."""
        for ring in self._ranks:
            ring.mark_settled()

    def read(self, position: int) -> Given:
        """As of one rank, with the times of rank 0. Raises ``RuntimeError`` where ranks have kept
        different tokens, or one has waited for another in vain.

        Where a rank gives nothing none does: that there was NaN, one may see before another.
        """
        with naming_missing_words(self._fault_4):
            first, *others = (ring.read(position) for ring in self._ranks)
        if not all(given.tokens for given in (first, *others)):
            return first._replace(tokens=[])
        for rank, given in enumerate(others, 1):
            pairs = zip_longest(given.tokens, first.tokens)
            for place, (token, expected) in enumerate(pairs, position + 1):
                check_token(token, expected, rank, place)
        return first

    def forget(self) -> None:
        """As of one rank."""
        for ring in self._ranks:
            ring.forget()


AnyBlockRing = BlockRing | BlockRings
