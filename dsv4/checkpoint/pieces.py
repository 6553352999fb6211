"""Bytes of files and who gets which of them: in file order, in equal parts, in batches."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """Bytes ``first`` to ``stop`` of every row of a piece, and where they go: one of the rows of
    ``memory``, contiguous uint8 ``[matrices, bytes]``.
    """

    memory: Tensor
    first: int
    stop: int


class Piece(NamedTuple):
    """``rows`` rows of ``width`` bytes, one after another in ``file`` from ``offset`` on. They are
    read once, whoever shares them; they go to row ``matrix`` of the memory of every share.
    """

    file: Path
    offset: int
    rows: int
    width: int
    shares: tuple[Share, ...]
    matrix: int = 0

    @classmethod
    def whole(cls, file: Path, offset: int, target: Tensor) -> "Piece":
        """Bytes that all go to ``target``, contiguous uint8 ``[bytes]``."""
        width = target.numel()
        return cls(file, offset, 1, width, (Share(target.view(1, width), 0, width),))

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    def targets(self) -> list[tuple[Share, Tensor]]:
        """Where each share goes: uint8 ``[bytes]``."""
        return [(share, share.memory[self.matrix]) for share in self.shares]


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces as a disk likes to read them."""
    return sorted(pieces, key=lambda piece: (str(piece.file), piece.offset))


def equal_parts(pieces: list[Piece], parts: int) -> list[list[Piece]]:
    """``pieces`` in ``parts`` runs of about as many bytes; of few pieces some runs are empty."""
    total = sum(piece.nbytes for piece in pieces)
    runs: list[list[Piece]] = [[] for _ in range(parts)]
    done = 0
    for piece in pieces:
        runs[min(done * parts // max(total, 1), parts - 1)].append(piece)
        done += piece.nbytes
    return runs


def batches(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """The pieces, cut where one is larger than ``most`` bytes, in lists that together are at most
    as large.
    """
    batch = []
    total = 0
    for piece in pieces:
        for part in _fitting(piece, most):
            if total + part.nbytes > most:
                yield batch
                batch = []
                total = 0
            batch.append(part)
            total += part.nbytes
    if batch:
        yield batch


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
    for share, target in piece.targets():
        own = share.stop - share.first
        shares.append(share._replace(memory=target[None, first * own : stop * own]))
    offset = piece.offset + first * piece.width
    return Piece(piece.file, offset, stop - first, piece.width, tuple(shares))


def _part_of_row(row: Piece, first: int, stop: int) -> Piece:
    shares = []
    for share, target in row.targets():
        low = max(first, share.first)
        high = min(stop, share.stop)
        if low < high:
            own = target[None, low - share.first : high - share.first]
            shares.append(Share(own, low - first, high - first))
    return Piece(row.file, row.offset + first, 1, stop - first, tuple(shares))
