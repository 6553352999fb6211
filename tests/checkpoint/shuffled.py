"""Pieces of files, in no order, and the memory that they go to."""

import random
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
