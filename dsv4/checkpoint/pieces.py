"""Bytes of files and who gets which of them: in file order, in equal parts, in batches."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """Bytes ``first`` to ``stop`` of every row of a piece, and where they go: ``target``,
    contiguous uint8 ``[rows · (stop − first)]``.
    """

    target: Tensor
    first: int
    stop: int


class Piece(NamedTuple):
    """``rows`` rows of ``width`` bytes, one after another in ``file`` from ``offset`` on. They are
    read once, whoever shares them.
    """

    file: Path
    offset: int
    rows: int
    width: int
    shares: tuple[Share, ...]

    @classmethod
    def whole(cls, file: Path, offset: int, *targets: Tensor) -> "Piece":
        """Bytes that all go to each of ``targets``, contiguous uint8 ``[bytes]``."""
        width = targets[0].numel()
        return cls(file, offset, 1, width, tuple(Share(target, 0, width) for target in targets))

    @property
    def nbytes(self) -> int:
        return self.rows * self.width


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
    shares = (
        share._replace(target=share.target[first * (n := share.stop - share.first) : stop * n])
        for share in piece.shares
    )
    offset = piece.offset + first * piece.width
    return Piece(piece.file, offset, stop - first, piece.width, tuple(shares))


def _part_of_row(row: Piece, first: int, stop: int) -> Piece:
    shares = []
    for share in row.shares:
        low = max(first, share.first)
        high = min(stop, share.stop)
        if low < high:
            target = share.target[low - share.first : high - share.first]
            shares.append(Share(target, low - first, high - first))
    return Piece(row.file, row.offset + first, 1, stop - first, tuple(shares))
