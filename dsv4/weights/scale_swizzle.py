"""Layout of block scales for Blackwell tensor cores (model.md#scale-swizzle)."""

import math

import torch
from torch import Tensor


def swizzle_block_scale(scale: Tensor) -> Tensor:
    """Block scales ``[..., R, S]`` (1 byte each) to the 128 × 4 layout of Blackwell tensor cores,
    every matrix zero padded by itself.

    model.md#scale-swizzle. Returns uint8 ``[..., ⌈R/128⌉ · ⌈S/4⌉ · 512]`` with scale (r, s) at
    ``((r/128)·⌈S/4⌉ + s/4)·512 + (r%32)·16 + ((r%128)/32)·4 + s%4`` (integer divisions).
    """
    rows, columns = scale.shape[-2:]
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    atoms = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    return atoms.transpose(-4, -2).flatten(-5)


def unswizzle_block_scale(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of ``swizzle_block_scale``: uint8 ``[..., rows, columns]``."""
    atoms = swizzled.unflatten(-1, (math.ceil(rows / 128), math.ceil(columns / 4), 32, 4, 4))
    padded = atoms.transpose(-4, -2).flatten(-2).flatten(-4, -2)
    return padded[..., :rows, :columns].contiguous()
