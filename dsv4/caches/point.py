"""A point of a sequence that can be gone back to from any distance."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.caches.filled import filled_draft_rows, filled_rows
from dsv4.caches.layer import AttentionState
from dsv4.limits import MAX_DECODE_TOKENS, MAX_TAKEN_BACK


@dataclass(frozen=True)
class Point:
    """Position and furthest position of a sequence, and on the host what the rings held there.
    ``has_draft``: also those of a draft module, all of whose rows were there.

    Compressed entries stay where they are: nothing writes those before a position that the sequence
    has not gone back behind.
    """

    position: int
    furthest: int
    has_draft: bool
    _rows: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        layers: tuple[AttentionState, ...],
        draft: DraftState | None,
        position: int,
        furthest: int,
    ) -> "Point":
        """The point at which the caches ``layers`` and ``draft`` are; all steps up to it are
        done.
        """
        furthest = kept_furthest(position, furthest)
        if draft is not None and not draft.is_whole(position, undoable_tokens(position, furthest)):
            draft = None
        parts = _ring_parts(layers, draft, position, furthest)
        rows = tuple(part.to("cpu", copy=True) for part in parts)
        return cls(position, furthest, draft is not None, rows)

    @property
    def undoable_tokens(self) -> int:
        """How many tokens can be taken back behind it."""
        return undoable_tokens(self.position, self.furthest)

    def restore(self, layers: tuple[AttentionState, ...], draft: DraftState | None) -> None:
        """Puts into the rings what they held."""
        kept = draft if self.has_draft else None
        parts = _ring_parts(layers, kept, self.position, self.furthest)
        for part, rows in zip(parts, self._rows, strict=True):
            part.copy_(rows)


def undoable_tokens(position: int, furthest: int) -> int:
    """How many tokens a sequence at ``position`` that has reached ``furthest`` can take back."""
    return min(MAX_DECODE_TOKENS, MAX_TAKEN_BACK - (furthest - position), position)


def kept_furthest(position: int, furthest: int) -> int:
    """What a sequence counts as having reached whose rows were kept at ``position``: they are those
    of the tokens that can be taken back from there, and of no token before.
    """
    return max(furthest, position + MAX_TAKEN_BACK - MAX_DECODE_TOKENS)


def _ring_parts(
    layers: tuple[AttentionState, ...], draft: DraftState | None, position: int, furthest: int
) -> Iterator[Tensor]:
    undoable = undoable_tokens(position, furthest)
    kept = filled_rows(layers, position, undoable)
    if draft is not None:
        kept = chain(kept, filled_draft_rows(draft, position, undoable))
    for rows in kept:
        if rows.in_ring:
            yield from rows.parts()
