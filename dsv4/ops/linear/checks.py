"""Checks that the decode and the prefill launchers of linear layers share."""

import torch
from torch import Tensor

from dsv4.weights.packed import PackedWeight
from dsv4.weights.quant import Weight

OUT_DTYPES = (torch.bfloat16, torch.float32)


def check_linear(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> PackedWeight:
    """The weight. Raises ``ValueError`` unless x is bfloat16 ``[T, K]``, W packed ``[N, K]`` and
    ``out_dtype`` a result's.
    """
    packed = check_operands(x, weight, out_dtype)
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        found = f"width {x.shape[-1]}" if x.dim() == 2 else f"{x.dim()} dimensions"
        expected = f"K = {weight.shape[1]} of the weight {weight.shape}"
        raise ValueError(f"x: found {found}, expected {expected}")
    return packed


def check_grouped(x_TGK: Tensor, weight: Weight) -> PackedWeight:
    """The weight. Raises ``ValueError`` unless x is bfloat16 ``[T, G, K]`` and W packed
    ``[G · R, K]``.
    """
    packed = check_operands(x_TGK, weight, torch.bfloat16)
    shape = tuple(x_TGK.shape)
    if len(shape) != 3 or weight.shape[0] % shape[1] or shape[2] != weight.shape[1]:
        expected = f"[T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        raise ValueError(f"x: found {shape}, expected {expected}")
    return packed


def check_norm(norm_weight: Tensor | None, width: int) -> None:
    """Raises ``ValueError`` for a norm weight that is not float32 ``[width]`` without gaps."""
    if norm_weight is None:
        return
    if norm_weight.dtype != torch.float32 or tuple(norm_weight.shape) != (width,):
        found = f"{norm_weight.dtype} {tuple(norm_weight.shape)}"
        raise ValueError(f"norm_weight: found {found}, expected torch.float32 ({width},)")
    if not norm_weight.is_contiguous():
        raise ValueError(f"norm_weight: found strides {norm_weight.stride()}, expected contiguous")


def check_operands(x: Tensor, weight: Weight, out_dtype: torch.dtype) -> PackedWeight:
    """The weight. Raises ``ValueError`` for what no product takes, whatever the sizes are."""
    if not isinstance(weight, PackedWeight):
        raise ValueError(f"weight: found {type(weight).__name__}, expected a PackedWeight")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"x: found strides {x.stride()}, expected rows without gaps")
    if out_dtype not in OUT_DTYPES:
        expected = "torch.bfloat16 or torch.float32"
        raise ValueError(f"out_dtype: found {out_dtype}, expected {expected}")
    if len(weight.shape) != 2:
        raise ValueError(f"weight: found shape {weight.shape}, expected one matrix [N, K]")
    return weight
