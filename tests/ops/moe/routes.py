"""The routes that the decode launch of the experts computes for itself."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.decode import moe_decode
from dsv4.ops.router import Router
from dsv4.ops.router.cuda import check_router
from dsv4.quant import QuantFormat
from dsv4.weights.packed import PackedWeight, padded

INNER = 64


def decode_routes(x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[T, P]`` of a decode launch on experts of zeros; skips the test when there is no token."""
    check_router(x_TE, tokens_T, router)
    if x_TE.shape[0] == 0:
        pytest.skip("a decode launch has tokens")
    (count, width), device = router.gate.shape, x_TE.device
    experts = ExpertWeights(
        *(zeros(device, count, *shape) for shape in ((INNER, width), (width, INNER), (INNER, width)))
    )
    shared = ExpertWeights(*(weight[0] for weight in (experts.w1, experts.w2, experts.w3)))
    _, ids_TP, weights_TP = moe_decode(x_TE, tokens_T, router, experts, shared, 10.0)
    return ids_TP, weights_TP


def zeros(device: torch.device, *shape: int) -> PackedWeight:
    """A stack of MXFP4 matrices of zeros."""
    *stack, rows, columns = shape
    tiles, chunks = padded(rows) // 16, padded(columns) // 64
    data = torch.zeros((*stack, tiles, chunks, 32, 16), dtype=torch.uint8, device=device)
    block_scale = torch.full((*stack, tiles, chunks, 8, 4), 127, dtype=torch.uint8, device=device)
    return PackedWeight(data, block_scale, None, QuantFormat.MXFP4, shape)
