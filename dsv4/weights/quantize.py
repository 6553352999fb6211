"""Quantisers: float matrices to the storage formats of ``dsv4.weights.quant``."""

import torch
from torch import Tensor

from dsv4.weights.codes import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two_exponent,
    e8m0_to_float,
    exponent_to_e8m0,
    pack_e2m1,
)
from dsv4.weights.quant import DATA_DTYPE, FP8_BLOCK, QuantFormat, QuantTensor, expand_blocks


def quantize(
    weight: Tensor, format: QuantFormat, global_scale: Tensor | None = None
) -> QuantTensor:
    """Quantises float ``[..., N, K]`` to ``format``; round to nearest even everywhere.

    NVFP4 takes an optional ``global_scale`` (float32, stack shape) so that w1 and w3 of an expert
    can share one (model.md#nvfp4). Raises ``ValueError`` for values that are not finite.
    """
    weight = weight.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: found NaN or infinity, expected finite values")
    if format is QuantFormat.NVFP4:
        return _quantize_nvfp4(
            weight, nvfp4_global_scale(weight) if global_scale is None else global_scale
        )
    if format is QuantFormat.MXFP4:
        return _quantize_mxfp4(weight)
    if format is QuantFormat.FP8_BLOCK128:
        return _quantize_fp8_block(weight)
    return QuantTensor.dense(weight.to(DATA_DTYPE[format]))


def nvfp4_global_scale(weight: Tensor) -> Tensor:
    """float32 scale amax / (6 · 448) of every matrix ``[..., N, K]``; 1 for a matrix of zeros."""
    amax = weight.float().abs().amax(dim=(-2, -1))
    return torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))


def _quantize_nvfp4(weight: Tensor, global_scale: Tensor) -> QuantTensor:
    groups = weight.unflatten(-1, (-1, 16))
    total = global_scale[..., None, None]
    block_scale = (
        (groups.abs().amax(-1) / (E2M1_MAX * total)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    )
    divisor = (block_scale.float() * total).unsqueeze(-1)
    scaled = torch.where(divisor > 0, groups / divisor, torch.zeros_like(groups))
    return QuantTensor(
        pack_e2m1(scaled.flatten(-2)),
        block_scale,
        global_scale,
        QuantFormat.NVFP4,
        tuple(weight.shape),
    )


def _quantize_mxfp4(weight: Tensor) -> QuantTensor:
    groups = weight.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1).clamp(min=E2M1_MAX * 2.0**-126)
    block_scale = exponent_to_e8m0(ceil_power_of_two_exponent(amax * (1 / E2M1_MAX)))
    scaled = groups / e8m0_to_float(block_scale).unsqueeze(-1)
    return QuantTensor(
        pack_e2m1(scaled.flatten(-2)), block_scale, None, QuantFormat.MXFP4, tuple(weight.shape)
    )


def _quantize_fp8_block(weight: Tensor) -> QuantTensor:
    *stack, rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-2, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    amax = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-4)
    block_scale = exponent_to_e8m0(ceil_power_of_two_exponent(amax * (1 / E4M3_MAX)))
    scaled = weight / expand_blocks(e8m0_to_float(block_scale), tuple(weight.shape))
    data = scaled.to(torch.float8_e4m3fn)
    return QuantTensor(data, block_scale, None, QuantFormat.FP8_BLOCK128, tuple(weight.shape))
