"""Layout of block scales for Blackwell tensor cores (model.md#scale-swizzle)."""

import math

import torch
from torch import Tensor


def swizzle_block_scale(scale: Tensor) -> Tensor:
    """Block scales ``[R, S]`` (1 byte each) to the 128 × 4 layout of Blackwell tensor cores, zero
    padded.

    model.md#scale-swizzle. Returns uint8 ``[⌈R/128⌉ · ⌈S/4⌉ · 512]`` with scale (r, s) at
    ``((r/128)·⌈S/4⌉ + s/4)·512 + (r%32)·16 + ((r%128)/32)·4 + s%4`` (integer divisions).
    """
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    return (
        padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(-1)
    )


def unswizzle_block_scale(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of ``swizzle_block_scale``: uint8 ``[rows, columns]``."""
    row_atoms = math.ceil(rows / 128)
    column_atoms = math.ceil(columns / 4)
    atoms = swizzled.view(row_atoms, column_atoms, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return atoms.reshape(row_atoms * 128, column_atoms * 4)[:rows, :columns].contiguous()
