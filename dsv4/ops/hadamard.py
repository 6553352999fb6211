"""Walsh-Hadamard rotation of the indexer's queries and keys (model.md#indexer)."""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Sylvester-ordered Hadamard transform of the last dimension (a power of two n), times
    n^(−1/2).

    float32 inside, one rounding to the dtype of x. It is its own inverse; applying it to one side
    of a dot product only is a bug, applying it to both changes nothing but how well the sides
    quantise.
    """
    values = x.float()
    width = x.shape[-1]
    step = 1
    while step < width:
        a, b = values.unflatten(-1, (-1, 2, step)).unbind(-2)
        values = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return (values * width**-0.5).to(x.dtype)
