"""Pieces of files, in no order or many, the memory that they go to, and who counts them."""

import random
import time
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.pieces import Piece
from tests.checkpoint.folders import CPU


def memory(nbytes: int, device: torch.device = CPU) -> Tensor:
    return torch.full((nbytes,), 77, dtype=torch.uint8, device=device)


def shuffled_pieces(files: list[Path], device: torch.device = CPU) -> list[Piece]:
    """Both files in pieces of every kind of size, in no order."""
    pieces = []
    for file in files:
        offset = 0
        for nbytes in (1, 99, 100, 101, 0, 3, 250, 700, 3746):
            pieces.append(Piece.whole(file, offset, memory(nbytes, device)))
            offset += nbytes
    random.Random(0).shuffle(pieces)
    return pieces


def assert_filled(pieces: list[Piece]) -> None:
    for piece in pieces:
        expected = piece.file.read_bytes()[piece.offset : piece.offset + piece.nbytes]
        assert piece.shares[0].target.cpu().numpy().tobytes() == expected


class Reports:
    """Counts spans slowly enough for whatever is to stop them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, nbytes: int) -> None:
        self.count += 1
        time.sleep(0.005)


def long_transfer(files: list[Path]) -> list[Piece]:
    """1,000 spans."""
    files[1].write_bytes(bytes(100_000))
    return [Piece.whole(files[1], 100 * at, memory(100)) for at in range(1000)]
