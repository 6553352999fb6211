"""Router of a prefill chunk on the GPU: logits by a matrix product, then a selection kernel.

A decode step routes in the launch of its experts (``dsv4.ops.moe.decode``).
"""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear import prefill as linear_prefill
from dsv4.ops.linear.prefill_products import RecordLinear
from dsv4.ops.router import Router
from dsv4.ops.router.selection import (
    WARP,
    check_router,
    selection_arguments,
    selection_defines,
)
from dsv4.weights.packed import PackedWeight

# Warps of router.cu, each with a token.
_WARPS = 8


def route(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    linear: RecordLinear = linear_prefill.linear,
) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.router.route`` for bfloat16 x and a packed BF16 gate.

    Ids are int64, weights float32 ``[T, P]``. float32 logits, made by ``linear``; ties go to the
    lowest expert and NaN scores come first, as in torch's stable descending sort. A token id
    outside a hash router's table reads its first or last row. Raises ``ValueError`` for other
    operands.
    """
    check_router(x_TE, tokens_T, router)
    routes = (x_TE.shape[0], router.experts_per_token)
    ids_TP = recording.empty(routes, torch.int64)
    weights_TP = recording.empty(routes, torch.float32)
    logits_TX = linear(recording, x_TE, router.gate, torch.float32)
    kernel = Kernel("router/router", "router_select", selection_defines(router))
    recording.launch(
        by_tokens(_shape, kernel),
        logits_TX=logits_TX,
        logits_stride=logits_TX.stride(0),
        ids_TP=ids_TP,
        weights_TP=weights_TP,
        nan=recording.nan_1,
        **selection_arguments(router, tokens_T),
    )
    return ids_TP, weights_TP


def _shape(kernel: Kernel, tokens: int) -> Shape:
    return Shape(kernel, ceil_div(tokens, _WARPS), _WARPS * WARP, numbers={"T": tokens})
