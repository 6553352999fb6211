"""A point of a sequence that can be gone back to from any distance."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dsv4.caches.filled import filled_rows
from dsv4.caches.layer import AttentionState
from dsv4.limits import MAX_DECODE_TOKENS, MAX_TAKEN_BACK


@dataclass(frozen=True)
class Point:
    """Position and furthest position of a sequence, and on the host what the rings held there.

    Compressed entries stay where they are: nothing writes those before a position that the sequence
    has not gone back behind.
    """

    position: int
    furthest: int
    _rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, layers: tuple[AttentionState, ...], position: int, furthest: int) -> "Point":
        """The point at which the caches ``layers`` are; all steps up to it are done."""
        furthest = kept_furthest(position, furthest)
        rows = tuple(part.to("cpu", copy=True) for part in _ring_parts(layers, position, furthest))
        return cls(position, furthest, rows)

    @property
    def undoable_tokens(self) -> int:
        """How many tokens can be taken back behind it."""
        return undoable_tokens(self.position, self.furthest)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(rows.nbytes for rows in self._rows)

    def restore(self, layers: tuple[AttentionState, ...]) -> None:
        """Puts into the rings what they held."""
        parts = _ring_parts(layers, self.position, self.furthest)
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
    layers: tuple[AttentionState, ...], position: int, furthest: int
) -> Iterator[Tensor]:
    for rows in filled_rows(layers, position, undoable_tokens(position, furthest)):
        if rows.in_ring:
            yield from rows.parts()
