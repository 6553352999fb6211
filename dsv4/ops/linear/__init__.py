"""Linear layers: weights as stored, activations of 16 or 32 bit, in long steps also rounded ones
(docs/numerics.md#quantised-activations); float32 accumulation, one rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize_activations.emulated import dequantized_weight, multiplied
from dsv4.weights.quant import QuantTensor, Weight


@dataclass(frozen=True)
class RowList:
    """Matrices that multiply the same x, so that one call can compute all products.

    ``out_dtypes[i]`` is the dtype of product i, None for the dtype of x. ``for_choice``: so many of
    the last products serve the indexer's choice alone. ``gathered``: nothing but ``linear_rows``
    with a norm reads the first product, and nothing reads any before that; so ranks may share them.
    """

    weights: tuple[Weight, ...]
    out_dtypes: tuple[torch.dtype | None, ...]
    for_choice: int = field(default=0, kw_only=True)
    gathered: bool = field(default=False, kw_only=True)


def dequantized_rows(
    weights: Sequence[QuantTensor],
    out_dtypes: Sequence[torch.dtype | None],
    mode: ActivationMode = "bf16",
) -> RowList:
    """The torch ops' row list: every matrix by ``dequantized_weight``."""
    matrices = tuple(dequantized_weight(weight, mode) for weight in weights)
    return RowList(matrices, tuple(out_dtypes))


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · Wᵀ for x ``[T, K]`` and W ``[N, K]``: ``[T, N]`` in ``out_dtype`` (default: the dtype
    of x).

    float32 accumulation, one rounding at the end; T = 0 gives an empty result. An
    ``EmulatedWeight`` multiplies x rounded to its activations. Raises ``ValueError`` on a width
    mismatch.
    """
    if x.shape[-1] != weight.shape[-1]:
        expected = f"K = {weight.shape[-1]} of the weight {weight.shape}"
        raise ValueError(f"x: found width {x.shape[-1]}, expected {expected}")
    return (multiplied(x, weight, x.shape[0]) @ weight.dequantize().T).to(out_dtype or x.dtype)


def linear_rows(
    x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> tuple[Tensor, ...]:
    """``linear(x, W_i, out_dtype_i)`` for every matrix of the list, of x ``[T, K]``: a tuple of
    ``[T, N_i]``.

    With ``norm_weight`` float32 ``[K]``, x is replaced by ``rms_norm(x, norm_weight, norm_eps)``
    first, rounded to the dtype of x.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    return tuple(
        linear(x, weight, dtype)
        for weight, dtype in zip(rows.weights, rows.out_dtypes, strict=True)
    )


def grouped_linear(x_TGK: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal linear: group g of x ``[T, G, K]`` times rows g·R … g·R + R − 1 of W
    ``[G·R, K]`` (model.md#grouped-output).

    Returns ``[T, G, R]`` in the dtype of x. Raises ``ValueError`` when the rows do not divide into
    G groups.
    """
    groups = x_TGK.shape[1]
    if weight.shape[0] % groups or x_TGK.shape[2] != weight.shape[1]:
        expected = f"[T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        raise ValueError(f"x: found {tuple(x_TGK.shape)}, expected {expected}")
    weight_GRK = weight.dequantize().unflatten(0, (groups, -1))
    read_TGK = multiplied(x_TGK, weight, x_TGK.shape[0])
    y_GTR = read_TGK.transpose(0, 1) @ weight_GRK.transpose(1, 2)
    return y_GTR.transpose(0, 1).to(x_TGK.dtype)
