"""Bytes that came in one piece, each part of them put where it belongs."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of a piece of memory, for ``target``, contiguous uint8
    ``[bytes]``: all of them, or columns ``first`` to ``end`` of their rows of ``width`` bytes.
    """

    start: int
    stop: int
    target: Tensor
    width: int = 0
    first: int = 0
    end: int = 0


def scatter(memory: Tensor, parts: Iterable[Part]) -> None:
    """Copies parts of ``memory``, uint8 ``[bytes]``, to their targets, which are on its device."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for start, stop, target, width, first, end in parts:
        if end - first < width:
            columns = memory[start:stop].view(-1, width)[:, first:end]
            target.view(columns.shape).copy_(columns, non_blocking=True)
        else:
            targets.append(target)
            sources.append(memory[start:stop])
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
