"""Bytes of files and who gets which of them: in file order, in spans that are read at once."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes between two pieces that nobody wants are read with them where they are so few: a read more
# costs more.
GAP = 4096


class Share(NamedTuple):
    """Bytes ``first`` to ``stop`` of every row of a piece, and where they go: contiguous uint8
    ``[bytes]``.
    """

    target: Tensor
    first: int
    stop: int


class Piece(NamedTuple):
    """``rows`` rows of ``width`` bytes, one after another in ``file`` from ``offset`` on, which are
    read once, whoever shares them. ``name``: the parameter that they are a part of.
    """

    file: Path
    offset: int
    rows: int
    width: int
    shares: tuple[Share, ...]
    name: str = ""

    @classmethod
    def whole(cls, file: Path, offset: int, target: Tensor, name: str = "") -> "Piece":
        """Bytes that all go to ``target``, contiguous uint8 ``[bytes]``."""
        width = target.numel()
        return cls(file, offset, 1, width, (Share(target, 0, width),), name)

    @property
    def nbytes(self) -> int:
        return self.rows * self.width


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces as a disk likes to read them."""
    return sorted(pieces, key=lambda piece: (str(piece.file), piece.offset))


class Span(NamedTuple):
    """``nbytes`` bytes from ``offset`` on, which are read at once, and the pieces among them."""

    file: Path
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


def spans(pieces: Iterable[Piece], most: int) -> Iterator[Span]:
    """The pieces, which are in file order, in spans of at most ``most`` bytes; a piece that is
    larger is cut. Those of different devices take turns, so that all links are busy.
    """
    by_device: defaultdict[torch.device, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_device[piece.shares[0].target.device].append(piece)
    for turn in zip_longest(*(_joined(part, most) for part in by_device.values())):
        yield from (span for span in turn if span is not None)


def _joined(pieces: Iterable[Piece], most: int) -> Iterator[Span]:
    """Neighbours in one span, as many as fit."""
    together: list[Piece] = []
    end = 0
    for piece in pieces:
        for part in _fitting(piece, most):
            stop = max(end, part.offset + part.nbytes)
            first = together[0] if together else part
            is_neighbour = part.file == first.file and first.offset <= part.offset <= end + GAP
            if together and not (is_neighbour and stop - first.offset <= most):
                yield _span(together, end)
                together = []
                stop = part.offset + part.nbytes
            together.append(part)
            end = stop
    if together:
        yield _span(together, end)


def _span(pieces: list[Piece], end: int) -> Span:
    first = pieces[0]
    return Span(first.file, first.offset, end - first.offset, tuple(pieces))


def _fitting(piece: Piece, most: int) -> Iterator[Piece]:
    """A piece in parts of at most ``most`` bytes: whole rows, or parts of a row that is longer."""
    at_once = most // max(piece.width, 1)
    if piece.nbytes <= most:
        if piece.nbytes:
            yield piece
    elif at_once:
        for row in range(0, piece.rows, at_once):
            yield _some_rows(piece, row, min(row + at_once, piece.rows))
    else:
        for row in range(piece.rows):
            alone = _some_rows(piece, row, row + 1)
            for first in range(0, piece.width, most):
                yield _part_of_row(alone, first, min(first + most, piece.width))


def _some_rows(piece: Piece, first: int, stop: int) -> Piece:
    shares = []
    for share in piece.shares:
        own = share.stop - share.first
        shares.append(share._replace(target=share.target[first * own : stop * own]))
    offset = piece.offset + first * piece.width
    return Piece(piece.file, offset, stop - first, piece.width, tuple(shares), piece.name)


def _part_of_row(row: Piece, first: int, stop: int) -> Piece:
    shares = []
    for share in row.shares:
        low = max(first, share.first)
        high = min(stop, share.stop)
        if low < high:
            own = share.target[low - share.first : high - share.first]
            shares.append(Share(own, low - first, high - first))
    return Piece(row.file, row.offset + first, 1, stop - first, tuple(shares), row.name)
