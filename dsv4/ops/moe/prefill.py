"""Mixture of experts for 9 and more tokens on the GPU: route, sort, two grouped GEMMs, one sum.

Nothing returns to the host.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.checks import expect, expect_rows
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.exchange.prefill import send_partial
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.prefill import TILE_TOKENS
from dsv4.ops.linear.prefill_long import linear
from dsv4.ops.linear.prefill_products import RecordLinear
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.grouped import down, gate_up, sort_pairs
from dsv4.ops.moe.operands import Layer, check_experts
from dsv4.ops.moe.sorted_pairs import Sorted, sort_shared_bytes
from dsv4.ops.moe.token_part import TokenPart
from dsv4.ops.router import Router
from dsv4.ops.router.prefill import route
from dsv4.ops.router.selection import check_router
from dsv4.weights.packed import PackedWeight

# What a part of a long chunk may take beside the weights: a part of a Pro chunk is 4,352 tokens.
_WORKSPACE_BYTES = 1 << 30
# Dynamic shared memory of the sort, of the 227 KB that a block may have.
_SORT_SHARED_LIMIT = 220 << 10
# The launch adds rows; no record compares other numbers.
_COMBINE_THREADS = 256


class Routed(NamedTuple):
    """x bfloat16 ``[T, E]`` with the ids int64 and weights float32 ``[T, P]`` of its experts."""

    x_TE: Tensor
    ids_TP: Tensor
    weights_TP: Tensor

    def part(self, tokens: slice) -> "Routed":
        """The same for some of the tokens."""
        return Routed(self.x_TE[tokens], self.ids_TP[tokens], self.weights_TP[tokens])


# Records the experts of some tokens, which write y ``[T, E]``, bfloat16 or float32.
SumPart = Callable[[Recording, Routed, Layer, Tensor], None]


def moe(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Mixture:
    """``dsv4.ops.moe.moe`` for bfloat16 x ``[T, E]`` of many tokens and packed weights.

    Routes as ``dsv4.ops.router.prefill.route``, then computes ``expert_sum``. Raises ``ValueError``
    for other operands.
    """
    layer = Layer(experts, shared, float(limit))
    return moe_with(linear, recording, x_TE, tokens_T, router, layer)


def expert_sum(
    recording: Recording,
    x_TE: Tensor,
    ids_TP: Tensor,
    weights_TP: Tensor,
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Tensor:
    """``dsv4.ops.moe.expert_sum`` for bfloat16 x ``[T, E]``, ids int64, weights float32 ``[T, P]``.

    Rounds where the reference does: the weighted hidden rows and the result, to bfloat16; products
    and the sum over experts in ascending order are float32. An id outside [0, X) adds nothing. The
    tokens are taken in parts that keep the workspace near 1 GiB; a token's result does not depend
    on the parts. Raises ``ValueError`` for other dtypes and sizes.
    """
    tokens, per_token = ids_TP.shape
    expect_rows("x_TE", x_TE, torch.bfloat16, (tokens, experts.w1.shape[2]))
    expect("ids_TP", ids_TP, torch.int64, (tokens, per_token))
    expect("weights_TP", weights_TP, torch.float32, (tokens, per_token))
    layer = Layer(experts, shared, float(limit))
    sum_part = partial(_sum_part, linear)
    routed = Routed(x_TE, ids_TP, weights_TP)
    return _sum_in_parts(sum_part, recording, routed, layer, torch.bfloat16)


def moe_with(
    linear: RecordLinear,
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    layer: Layer,
    sum_part: SumPart | None = None,
) -> Mixture:
    """``moe`` by an implementation of ``linear``, for the gate and the shared expert's w2, or of
    all experts (``sum_part``).
    """
    check_router(x_TE, tokens_T, router)
    check_experts(x_TE, router, layer)
    x_TE = aligned_rows(recording, x_TE)
    ids_TP, weights_TP = route(recording, x_TE, tokens_T, router, linear)
    sum_part = sum_part or partial(_sum_part, linear)
    routed = Routed(x_TE, ids_TP, weights_TP)
    if recording.peers is None:
        y_TE = _sum_in_parts(sum_part, recording, routed, layer, torch.bfloat16)
        return Mixture(y_TE, ids_TP, weights_TP)
    partial_TE = _sum_in_parts(sum_part, recording, routed, layer, torch.float32)
    return Mixture(send_partial(recording, partial_TE), ids_TP, weights_TP)


def tokens_of_a_part(layer: Layer, per_token: int) -> int:
    """How many tokens share the workspace and one sort: a multiple of ``TILE_TOKENS``."""
    count, inner, width = layer.experts.w1.shape
    token_bytes = per_token * (4 * width + 2 * inner) + 4 * width + 2 * layer.shared.w1.shape[0]
    sort_pairs = (_SORT_SHARED_LIMIT - sort_shared_bytes(0, count)) // 4
    fitting = min(_WORKSPACE_BYTES // token_bytes, sort_pairs // per_token)
    return max(TILE_TOKENS, fitting // TILE_TOKENS * TILE_TOKENS)


def combine(
    recording: Recording,
    shared_product: Tensor,
    products: Tensor,
    ids_TP: Tensor,
    pairs: Sorted,
    y_TE: Tensor,
) -> None:
    """y ``[T, E]`` = shared product + those of the token's experts in ascending order, float32
    ``[T, E]`` and ``[T·P, E]``, rounded once to bfloat16 unless y is float32.
    """
    rounded = y_TE.dtype == torch.bfloat16
    kernel = Kernel("moe/moe_combine", "moe_combine" if rounded else "moe_combine_partial")
    recording.launch(
        by_tokens(_combine_shape, kernel),
        shared=shared_product,
        shared_stride=shared_product.stride(0),
        routed=products,
        ids=ids_TP,
        y=y_TE,
        width=y_TE.shape[1],
        per_token=pairs.per_token,
        experts=pairs.experts,
    )


def _sum_in_parts(
    sum_part: SumPart, recording: Recording, routed: Routed, layer: Layer, dtype: torch.dtype
) -> Tensor:
    """The buffers of a part are free again for the next one."""
    routed = routed._replace(x_TE=aligned_rows(recording, routed.x_TE))
    tokens, width = routed.x_TE.shape
    y_TE = recording.empty((tokens, width), dtype)
    most = tokens_of_a_part(layer, routed.ids_TP.shape[1])
    for start in range(0, tokens, most):
        part = slice(start, min(start + most, tokens))
        part_recording = TokenPart(recording, start, most)
        sum_part(part_recording, routed.part(part), layer, y_TE[part])
    return y_TE


def _sum_part(
    linear: RecordLinear, recording: Recording, routed: Routed, layer: Layer, y_TE: Tensor
) -> None:
    experts, shared, limit = layer
    x_TE, ids_TP, weights_TP = routed
    pairs = sort_pairs(recording, x_TE, ids_TP, experts.w1.shape[0])
    hidden = gate_up(recording, x_TE, experts.w1, experts.w3, limit, pairs, weights_TP)
    products = down(recording, hidden, experts.w2, pairs)
    shared_hidden = gate_up(recording, x_TE, shared.w1, shared.w3, limit)
    shared_product = linear(recording, shared_hidden, shared.w2, torch.float32)
    combine(recording, shared_product, products, ids_TP, pairs, y_TE)


def _combine_shape(kernel: Kernel, tokens: int) -> Shape:
    return Shape(kernel, tokens, _COMBINE_THREADS)
