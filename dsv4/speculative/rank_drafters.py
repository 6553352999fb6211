"""The drafters of several ranks as one: all ranks draft the same tokens, from the same bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from dsv4.ops import Ops
from dsv4.speculative.drafter import ChooseAt, Drafter, Proposal
from dsv4.speculative.module import DraftScope

Result = TypeVar("Result")


class OnRanks(Protocol):
    """Runs ``run(rank, ops)`` of all ranks, side by side: the result of rank 0."""

    def __call__(self, run: Callable[[int, Ops], Result]) -> Result: ...


@dataclass(frozen=True)
class RankDrafters:
    """``Drafter`` of all ranks, which reads the taps of rank 0: all ranks have the same streams.
    ``make(rank, ops)``: the drafter of a rank, of ops that know the others.
    """

    scope: DraftScope
    make: Callable[[int, Ops], Drafter]
    on_ranks: OnRanks

    def remember(self, token_ids: Sequence[int], taps: Mapping[str, Tensor], start: int) -> None:
        """See ``Drafter``."""
        self.on_ranks(lambda rank, ops: self.make(rank, ops).remember(token_ids, taps, start))

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        """See ``Drafter``."""

        def propose(rank: int, ops: Ops) -> Proposal:
            return self.make(rank, ops).propose(token, position, count, choose)

        return self.on_ranks(propose)
