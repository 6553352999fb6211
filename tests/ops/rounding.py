"""Error measure of ops that round an intermediate value as well as their result."""

from collections.abc import Callable

import torch
from torch import Tensor

SLACK = 2e-6


def assert_rounded_twice(actual: Tensor, inner: Tensor, outer: Callable[[Tensor], Tensor]) -> None:
    """``actual`` is outer(inner) with both rounded once to its dtype.

    ``inner`` and the results of ``outer`` are float64. float32 arithmetic may move an inner value
    that lies between two neighbours by ``SLACK`` of the peak: there, and only there, either
    neighbour is right.
    """
    moved = SLACK * inner.abs().amax()
    exact, low, high = (outer((inner + d).to(actual.dtype).double()) for d in (0.0, -moved, moved))
    assert actual.shape == exact.shape
    half_ulp = torch.finfo(actual.dtype).eps / 2
    allowed = half_ulp * exact.abs() + SLACK * exact.abs().amax() + (high - low).abs()
    error = (actual.double() - exact).abs()
    assert bool((error <= allowed).all()), (
        f"largest error {float(error.max()):.3g} at {float(exact.abs().max()):.3g}"
    )
