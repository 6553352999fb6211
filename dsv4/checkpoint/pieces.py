"""Bytes of files and who gets which of them: in file order, in spans that are read at once."""

from collections import defaultdict, deque
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
    """The pieces, which are in file order, in spans of at most ``most`` bytes. Pieces are cut so
    that spans of neighbours are full. Those of different devices take turns, so that all links are
    busy. A piece is let go with its span, and with it the memory of a target that nobody else has.
    """
    by_device: defaultdict[torch.device, deque[Piece]] = defaultdict(deque)
    for piece in pieces:
        by_device[piece.shares[0].target.device].append(piece)
    turns = zip_longest(*(_joined(_taken(part), most) for part in by_device.values()))
    return (span for turn in turns for span in turn if span is not None)


def _taken(pieces: deque[Piece]) -> Iterator[Piece]:
    while pieces:
        yield pieces.popleft()


def _joined(pieces: Iterable[Piece], most: int) -> Iterator[Span]:
    """Neighbours in one span, as many bytes as fit."""
    together: list[Piece] = []
    file = None
    start = 0
    end = 0
    for piece in pieces:
        its_file, offset, rows, width, _, _ = piece
        is_same_file = its_file is file or its_file == file
        is_neighbour = is_same_file and start <= offset <= end + GAP
        stop = offset + rows * width
        # Most pieces are small, and there are hundreds of thousands of them.
        if is_neighbour and offset < stop <= start + most:
            together.append(piece)
            end = max(end, stop)
            continue
        room = start + most - offset if is_neighbour else 0
        for part in _fitting(piece, room, most):
            stop = part.offset + part.nbytes
            if together and not (is_neighbour and stop - start <= most):
                yield Span(together[0].file, start, end - start, tuple(together))
                together = []
            if not together:
                file = part.file
                start = part.offset
                end = start
                is_neighbour = True
            together.append(part)
            end = max(end, stop)
    if together:
        yield Span(together[0].file, start, end - start, tuple(together))


def _fitting(piece: Piece, room: int, most: int) -> Iterator[Piece]:
    """A piece that is larger than ``room`` in parts of at most ``most`` bytes, the first in
    ``room`` if anything of it fits there. Several rows stay whole where they can.
    """
    if piece.rows == 1:
        yield from _parts_of_row(piece, room, most)
    elif piece.width <= most:
        first = max(0, room) // piece.width
        if first:
            yield _some_rows(piece, 0, first)
        for row in range(first, piece.rows, most // piece.width):
            yield _some_rows(piece, row, min(row + most // piece.width, piece.rows))
    else:
        for row in range(piece.rows):
            yield from _parts_of_row(_some_rows(piece, row, row + 1), 0, most)


def _parts_of_row(row: Piece, room: int, most: int) -> Iterator[Piece]:
    first = max(0, min(room, row.width))
    if first:
        yield _part_of_row(row, 0, first)
    for start in range(first, row.width, most):
        yield _part_of_row(row, start, min(start + most, row.width))


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
