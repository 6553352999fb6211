"""Mixture of experts, decode: Flash and Pro in NVIDIA's formats (routed NVFP4, shared FP8)."""

import itertools
from collections.abc import Callable, Iterator

import torch

from dsv4.ops.immediate import TimedOp
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.decode import moe
from dsv4.ops.op_case import OpCase
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight, chunk_columns, pack_weight, padded
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_bytes, packed_shapes

GEOMETRIES = {"Flash": (4096, 2048), "Pro": (7168, 3072)}
EXPERTS = {"Flash": 256, "Pro": 384}
PER_TOKEN = 6
LIMIT = 10.0
# Calls before one finds its router and its shared expert a second time.
_INPUTS = 24


def cases() -> Iterator[OpCase]:
    """Routing and experts of a layer for 1 to 8 tokens, which choose among all of its experts."""
    nvfp4 = QuantFormat.NVFP4
    fp8 = QuantFormat.FP8_BLOCK128
    for model in GEOMETRIES:
        for tokens in (1, 2, 4, 8):
            yield moe_case(model, tokens, nvfp4, fp8)
        yield moe_case(model, 1, nvfp4, nvfp4)
        yield moe_case(model, 1, QuantFormat.MXFP4, fp8)


def moe_case(model: str, tokens: int, routed: QuantFormat, shared: QuantFormat) -> OpCase:
    """One case. Every call of a copy takes the next of 24 inputs, each with a router and a shared
    expert of its own; the bytes are those of as many experts as random routers choose on average.
    """
    (width, inner) = GEOMETRIES[model]
    count = EXPERTS[model]
    distinct = count * (1 - (1 - PER_TOKEN / count) ** tokens)
    shapes = ((inner, width), (width, inner), (inner, width))
    expert_bytes = sum(packed_bytes(routed, shape) for shape in shapes)
    common_bytes = sum(packed_bytes(shared, shape) for shape in shapes) + 2 * count * width
    nbytes = int(distinct * expert_bytes) + common_bytes + 4 * tokens * width

    def one_input() -> tuple[torch.Tensor, torch.Tensor, Router, ExpertWeights]:
        x_TE = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        gate_XE = torch.randn(count, width, dtype=torch.bfloat16, device="cuda") * width**-0.5
        bias_X = torch.zeros(count, device="cuda")
        router = Router(pack_weight(QuantTensor.dense(gate_XE)), bias_X, False, PER_TOKEN, 1.5)
        common = ExpertWeights(*(random_weight(shared, shape) for shape in shapes))
        return x_TE, torch.zeros(tokens, dtype=torch.int64, device="cuda"), router, common

    def make(index: int) -> Callable[[], object]:
        experts = ExpertWeights(*(random_weight(routed, (count, *shape)) for shape in shapes))

        def prepared() -> TimedOp:
            x_TE, tokens_T, router, common = one_input()
            return TimedOp(moe, x_TE, tokens_T, router, experts, common, LIMIT)

        runs = itertools.cycle([prepared().run for _ in range(_INPUTS)])
        return lambda: next(runs)()

    flops = 2 * tokens * width * (3 * inner * (PER_TOKEN + 1) + count)
    name = f"{model} T={tokens}, {routed.value}, shared {shared.value}, with its router"
    return OpCase("moe", name, make, nbytes, flops, count * expert_bytes + _INPUTS * common_bytes)


def random_weight(format: QuantFormat, shape: tuple[int, ...]) -> PackedWeight:
    """Random codes and moderate random scales, packed, without a detour over float32."""
    *stack, rows, columns = shape
    tiles = padded(rows) // 16
    chunks = padded(columns) // chunk_columns(format)
    data = torch.randint(0, 256, (*stack, tiles, chunks, 32, 16), dtype=torch.uint8, device="cuda")
    block_scale = None
    global_scale = None
    if format is QuantFormat.FP8_BLOCK128:
        data &= 0xF7  # no NaN codes
        scales = packed_shapes(format, shape)["block_scale"]
        assert scales is not None
        block_scale = torch.rand(scales, device="cuda") * 1e-4
    elif format is QuantFormat.NVFP4:
        scales = (*stack, tiles, padded(columns) // 64, 8, 8)
        block_scale = torch.randint(0x28, 0x40, scales, dtype=torch.uint8, device="cuda")
        global_scale = torch.full(tuple(stack), 0.01, device="cuda")
    elif format is QuantFormat.MXFP4:
        scales = (*stack, tiles, padded(columns) // 64, 8, 4)
        block_scale = torch.randint(117, 122, scales, dtype=torch.uint8, device="cuda")
    else:
        values = (
            torch.randn(*stack, tiles, chunks, 32, 8, dtype=torch.bfloat16, device="cuda") * 0.02
        )
        data = values.view(torch.uint8)
    return PackedWeight(data, block_scale, global_scale, format, shape)
