"""Weight-only linear layers: weights as stored, activations 16 or 32 bit, float32 accumulation, one rounding."""

import torch
from torch import Tensor

from dsv4.quant import QuantTensor


def decode_weight(weight: QuantTensor) -> QuantTensor:
    """The torch ops' weight layout: the same values decoded once to float32, so that no step pays for decoding."""
    return QuantTensor.dense(weight.dequantize())


def linear(x: Tensor, weight: QuantTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · Wᵀ for x ``[T, K]`` and W ``[N, K]``: ``[T, N]`` in ``out_dtype`` (default: the dtype of x).

    float32 accumulation, one rounding at the end; T = 0 gives an empty result. Raises ``ValueError`` on a width
    mismatch.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x: found width {x.shape[-1]}, expected K = {weight.shape[-1]} of the weight {weight.shape}")
    return (x.float() @ weight.dequantize().T).to(out_dtype or x.dtype)


def grouped_linear(x_TGK: Tensor, weight: QuantTensor) -> Tensor:
    """Block-diagonal linear (o_a, spec §3.4): group g of x ``[T, G, K]`` times rows g·R … g·R + R − 1 of W ``[G·R,
    K]``.

    Returns ``[T, G, R]`` in the dtype of x. Raises ``ValueError`` when the rows do not divide into G groups.
    """
    groups = x_TGK.shape[1]
    if weight.shape[0] % groups or x_TGK.shape[2] != weight.shape[1]:
        raise ValueError(
            f"x: found {tuple(x_TGK.shape)}, expected [T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        )
    weight_GRK = weight.dequantize().unflatten(0, (groups, -1))
    y_GTR = x_TGK.float().transpose(0, 1) @ weight_GRK.transpose(1, 2)
    return y_GTR.transpose(0, 1).to(x_TGK.dtype)
