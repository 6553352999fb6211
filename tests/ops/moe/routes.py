"""The routes that the decode launch of the experts computes for itself."""

from typing import Any

import torch
from torch import Tensor

from dsv4.ops.immediate import immediately
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.decode import moe
from dsv4.ops.router import Router
from dsv4.ops.router.selection import check_router
from dsv4.weights.packed import PackedWeight, padded
from dsv4.weights.quant import QuantFormat

INNER = 64


def decode_routes(
    x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]
) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[T, P]`` of a decode launch on experts of zeros."""
    arguments = on_zero_experts(x_TE, tokens_T, router)
    _, ids_TP, weights_TP = immediately(moe)(*arguments)
    return ids_TP, weights_TP


def on_zero_experts(
    x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]
) -> tuple[Any, ...]:
    """Arguments of such a launch."""
    check_router(x_TE, tokens_T, router)
    (count, width) = router.gate.shape
    device = x_TE.device
    shapes = ((INNER, width), (width, INNER), (INNER, width))
    experts = ExpertWeights(*(zeros(device, count, *shape) for shape in shapes))
    shared = ExpertWeights(*(weight[0] for weight in (experts.w1, experts.w2, experts.w3)))
    return x_TE, tokens_T, router, experts, shared, 10.0


def zeros(device: torch.device, *shape: int) -> PackedWeight:
    """A stack of MXFP4 matrices of zeros."""
    *stack, rows, columns = shape
    tiles = padded(rows) // 16
    chunks = padded(columns) // 64
    data = torch.zeros((*stack, tiles, chunks, 32, 16), dtype=torch.uint8, device=device)
    block_scale = torch.full((*stack, tiles, chunks, 8, 4), 127, dtype=torch.uint8, device=device)
    return PackedWeight(data, block_scale, None, QuantFormat.MXFP4, shape)
