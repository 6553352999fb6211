"""RMS normalisation with a weight, and per head without one (model.md#rmsnorm)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y = w · x · rsqrt(mean(x²) + eps) over the last dimension, float32 inside, one rounding to
    the dtype of x.

    x ``[..., D]``; ``weight`` ``[D]`` (any float dtype, plain weight) or None for the unweighted
    norm.
    """
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        values = values * weight.float()
    return values.to(x.dtype)
