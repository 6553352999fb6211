"""The steps of several ranks side by side: what one rank's step offers, for all of them.

A part ends where a rank's partial result is on its way and begins where the sum over the ranks is
needed. So the ranks run part by part: whatever waits for other ranks is queued behind what they
have to do for it, and a run that is interrupted leaves nobody waiting.
"""

from collections import deque
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.values import Seen
from dsv4.peers import naming_missing_words
from dsv4.sampling import Sampler, SamplerState
from dsv4.step.observer import Observer
from dsv4.step.parts import AnyPart, Barrier
from dsv4.step.recorded import RecordedStep
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed
from dsv4.step.token_ring import TokenRing
from dsv4.stream_barrier import StreamBarrier

# Values of which every rank has some columns: heads.
_CUT_VALUES = ("attn.q", "attn.heads")


class LockStep:
    """The same step of every rank. Results are those of rank 0, which all of them have."""

    def __init__(self, ranks: Sequence[Step], state: DecodeState) -> None:
        """``state``: of rank 0."""
        self.ranks = tuple(ranks)
        self.first = self.ranks[0]
        self._state = state
        feeds = [step.feed for step in ranks if step.feed is not None]
        self.feed = Feeds(feeds) if feeds else None
        self.tokens = self.first.tokens
        self._barrier = StreamBarrier(len(self.ranks))

    @property
    def recorded(self) -> RecordedStep:
        """That of rank 0."""
        return self.first.recorded

    @property
    def hidden_TE(self) -> Tensor:
        """As of one rank."""
        return self.first.hidden_TE

    @property
    def logits_TV(self) -> Tensor:
        """As of one rank."""
        return self.first.logits_TV

    @property
    def token(self) -> Tensor:
        """As of one rank."""
        return self.first.token

    def show(self, seen: Seen, position: int) -> None:
        """As of one rank, with the heads of all."""
        joined = JoinedValues(seen, len(self.ranks))
        for rank, step in enumerate(self.ranks):
            step.show(joined.of(rank), position)

    def run(self, tokens: int, end: int | None = None, observer: Observer | None = None) -> None:
        """As of one rank."""
        self._state.begin_step(self.recorded.steps_begun)
        dense = self.recorded.is_dense(end)
        with self._state.turn():
            self._run([step.model_parts for step in self.ranks], tokens, dense, observer)

    def sample(self, observer: Observer | None = None) -> None:
        """Queues the choice of the next token, on every rank."""
        with self._state.turn():
            self._run([step.sample_parts for step in self.ranks], 1, False, observer)

    def _run(
        self,
        ranks_parts: list[list[AnyPart]],
        tokens: int,
        dense: bool,
        observer: Observer | None,
    ) -> None:
        streams = [torch.cuda.current_stream(step.recorded.head) for step in self.ranks]
        for parts in zip(*ranks_parts, strict=True):
            if isinstance(parts[0], Barrier):
                self._barrier.cross(streams)
                continue
            for step, part in zip(self.ranks, parts, strict=True):
                step.run_part(part, tokens, dense, observer)


class Feeds:
    """The inputs of all ranks: every rank's sampler writes its own."""

    def __init__(self, ranks: Sequence[TokenFeed]) -> None:
        self._ranks = ranks

    def put(self, token_ids: Sequence[int]) -> None:
        """As of one rank."""
        for feed in self._ranks:
            feed.put(token_ids)

    def pass_on(self) -> None:
        """As of one rank."""
        for feed in self._ranks:
            feed.pass_on()


class Samplers:
    """The sampler's settings of all ranks."""

    def __init__(self, ranks: Sequence[SamplerState]) -> None:
        self._ranks = ranks

    def load(self, sampler: Sampler) -> None:
        """As of one rank."""
        for state in self._ranks:
            state.load(sampler)


class Rings:
    """The token rings of all ranks, which hold the same tokens unless there is a fault."""

    def __init__(self, ranks: Sequence[TokenRing], fault_4: Tensor) -> None:
        """``fault_4``: what a kernel that waited for a rank in vain says (``Peers``)."""
        self._ranks = ranks
        self._fault_4 = fault_4

    def mark(self, position: int) -> None:
        """As of one rank."""
        for ring in self._ranks:
            ring.mark(position)

    def read(self, position: int) -> int:
        """As of one rank. Raises ``RuntimeError`` where ranks have chosen different tokens, or one
        has waited for another in vain.
        """
        with naming_missing_words(self._fault_4):
            tokens = [ring.read(position) for ring in self._ranks]
        for rank, token in enumerate(tokens):
            check_token(token, tokens[0], rank, position)
        return tokens[0]


def check_token(token: int | None, expected: int | None, rank: int, position: int) -> None:
    """Raises ``RuntimeError`` for a token that is not that of rank 0, ``expected``. None: there is
    none.
    """
    if token != expected:
        what = "no token" if token is None else f"token {token}"
        found = f"found {what} of rank {rank} at position {position}"
        wanted = "none" if expected is None else expected
        raise RuntimeError(f"ranks: {found}, expected {wanted} as of rank 0")


class JoinedValues:
    """Values of a traced step, whole, in the order of rank 0: heads of all ranks side by side, the
    others of rank 0.
    """

    def __init__(self, seen: Seen, ranks: int) -> None:
        self._seen = seen
        self._ranks = ranks
        # Of rank 0, from the first one that other ranks have not completed.
        self._waiting: deque[tuple[str, Tensor]] = deque()
        self._cut: dict[str, dict[int, Tensor]] = {}
        self._one_at_a_time = Lock()

    def of(self, rank: int) -> Seen:
        """What is called with the values of ``rank``."""

        def seen(name: str, rows: Tensor) -> None:
            with self._one_at_a_time:
                if name.endswith(_CUT_VALUES):
                    self._cut.setdefault(name, {})[rank] = rows
                if rank == 0:
                    self._waiting.append((name, rows))
                self._show_whole()

        return seen

    def _show_whole(self) -> None:
        while self._waiting:
            name, rows = self._waiting[0]
            if name.endswith(_CUT_VALUES):
                if len(self._cut[name]) < self._ranks:
                    return
                cut = self._cut.pop(name)
                rows = torch.cat([cut[rank] for rank in range(self._ranks)], 1)
            self._waiting.popleft()
            self._seen(name, rows)


AnyStep = Step | LockStep
AnyFeed = TokenFeed | Feeds
AnySampler = SamplerState | Samplers
AnyRing = TokenRing | Rings
