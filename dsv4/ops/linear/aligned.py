"""Rows that the prefill kernels can read: 16 bytes at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.integers import round_up
from dsv4.launch.buffers import is_aligned
from dsv4.launch.recording import Recording

# bfloat16 values in 16 bytes.
_VECTOR = 8


def aligned_rows(recording: Recording, x: Tensor) -> Tensor:
    """x bfloat16 ``[..., K]`` with every row at a multiple of 16 bytes: itself, or a copy.

    A copy is needed where K is no multiple of 8, which no published model has.
    """
    sizes = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    if is_aligned(x, 16) and all(step % _VECTOR == 0 for step, size in sizes if size > 1):
        return x
    copy = empty_rows(recording, x.shape, x.dtype)
    recording.call(copy_rows, copy, x)
    return copy


def empty_rows(recording: Recording, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A 16-bit buffer ``[..., K]`` with every row at a multiple of 16 bytes."""
    *sizes, width = shape
    return recording.empty((*sizes, round_up(width, _VECTOR)), dtype)[..., :width]


def copy_rows(tokens: int, to: Tensor, source: Tensor) -> None:
    """For ``Recording.call``: the rows of the tokens of a step."""
    to[:tokens].copy_(source[:tokens])


def without_gaps(recording: Recording, y_TN: Tensor) -> Tensor:
    """y, or a copy of rows that lie apart: of odd N, which no published model has."""
    if y_TN.is_contiguous():
        return y_TN
    copy = recording.empty(y_TN.shape, y_TN.dtype)
    recording.call(copy_rows, copy, y_TN)
    return copy
