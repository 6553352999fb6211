"""How far the results of a native kernel may be from those of what it stands in for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.moe import Mixture


@dataclass(frozen=True)
class Tolerance:
    """``slack``: what a value may differ by beside one rounding, as a part of the largest value of
    its row. ``share``: how many values may differ at all.
    """

    slack: float
    share: float


# Sums of the same exact products in another order. Each is within 3e-6 of the largest value
# (tests/ops/linear/test_prefill_linear.py); so few values lie that near to a rounding boundary.
PRODUCT = Tolerance(6e-6, 0.01)
# Hidden rows are rounded between two products, and each of a few thousand may be one rounding
# apart.
MIXTURE = Tolerance(2e-3, 0.5)
# Rows that are rounded to 8 or 4 bit between two computations in float32: some codes are the next
# ones.
REQUANTISED = Tolerance(0.03, 1.0)
_OTHER_EXPERTS = 0.02


def difference(found: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    """What is wrong with ``found`` ``[..., N]`` in one line; None if nothing is. NaN is wrong."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"found {_described(found)}, expected {_described(expected)}"
    if expected.numel() == 0:
        return None
    wide = expected.float()
    apart = (found.float() - wide).abs()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    allowed = torch.finfo(expected.dtype).eps * wide.abs() + tolerance.slack * largest
    wrong = ~(apart <= allowed)
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        count = f"{int(wrong.sum())} of {wrong.numel()} values are wrong"
        return f"{count}, at {first} found {found[first]:.6g}, expected {expected[first]:.6g}"
    differing = int((apart > 0).sum())
    if found.dtype == torch.bfloat16 and differing > tolerance.share * wrong.numel():
        most = f"{tolerance.share:.0%}"
        return f"{differing} of {wrong.numel()} values are rounded apart, expected at most {most}"
    return None


def mixture_difference(found: Mixture, expected: Mixture, tolerance: Tolerance) -> str | None:
    """The same of a mixture's rows, for tokens that went to the same experts: all but those at
    near ties of the gate have to.
    """
    same_T = (found.ids_TP.sort().values == expected.ids_TP.sort().values).all(dim=1)
    others = same_T.numel() - int(same_T.sum())
    if others > _OTHER_EXPERTS * same_T.numel():
        return f"{others} of {same_T.numel()} tokens go to other experts"
    return difference(found.y_TE[same_T], expected.y_TE[same_T], tolerance)


def different_bits(found: Tensor, expected: Tensor) -> str | None:
    """The same for results that have to be equal bit by bit."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"found {_described(found)}, expected {_described(expected)}"
    ours, theirs = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))
    wrong = ours != theirs
    if not bool(wrong.any()):
        return None
    count = f"{int(wrong.sum())} of {wrong.numel()} bytes differ"
    return f"{count}, the first at {int(wrong.nonzero()[0])}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
