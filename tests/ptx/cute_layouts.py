"""CuTe's layouts as numbers, without a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np


def evaluate(build: Callable[[], Any], architecture: str) -> Any:
    """What ``build`` makes of CuTe's layouts while a function for the architecture is traced."""
    from cutlass import cute

    found = []

    @cute.jit
    def trace() -> None:
        found.append(build())

    cute.compile(trace, options=f"--gpu-arch {architecture}")
    return found[0]


def offset(coordinate: Any, shape: Any, stride: Any) -> Any:
    """Where a layout ``shape:stride`` has a coordinate; arrays stand for many coordinates.

    One number for several modes counts through the first of them first.
    """
    if isinstance(coordinate, tuple):
        return sum(offset(*mode) for mode in zip(coordinate, shape, stride, strict=True))
    if not isinstance(shape, tuple):
        return coordinate * stride
    total = 0
    for mode, step in zip(shape, stride, strict=True):
        size = int(np.prod(np.array(_flat(mode))))
        total = total + offset(coordinate % size, mode, step)
        coordinate = coordinate // size
    return total


def _flat(shape: Any) -> list[int]:
    return [n for mode in shape for n in _flat(mode)] if isinstance(shape, tuple) else [shape]


def indices(layout: Any, threads: int, values: int) -> np.ndarray:
    """A thread-value layout as int64 ``[threads, values]``."""
    coordinate = (np.arange(threads)[:, None], np.arange(values)[None])
    return offset(coordinate, layout.shape, layout.stride)
