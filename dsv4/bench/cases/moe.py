"""Mixture of experts, decode: Flash and Pro with NVIDIA's mix of formats (routed NVFP4, shared FP8)."""

from collections.abc import Callable, Iterator

import torch

from dsv4.bench.op_case import OpCase
from dsv4.ops.cuda.moe import moe
from dsv4.ops.cuda.packed import PackedWeight, chunk_columns, padded
from dsv4.ops.moe import ExpertWeights
from dsv4.quant import QuantFormat, packed_bytes, packed_shapes

GEOMETRIES = {"Flash": (4096, 2048), "Pro": (7168, 3072)}
PER_TOKEN, LIMIT = 6, 10.0
# Distinct experts that this many tokens choose among 384, on average.
_DISTINCT = {1: 6, 2: 12, 3: 18, 4: 23, 8: 45}


def cases() -> Iterator[OpCase]:
    """The decode pair for 1 to 8 tokens; each copy has exactly the experts that its tokens choose."""
    nvfp4, fp8 = QuantFormat.NVFP4, QuantFormat.FP8_BLOCK128
    for model in GEOMETRIES:
        for tokens in (1, 2, 4, 8):
            yield moe_case(model, tokens, nvfp4, fp8)
        yield moe_case(model, 1, nvfp4, nvfp4)
        yield moe_case(model, 1, QuantFormat.MXFP4, fp8)


def moe_case(
    model: str,
    tokens: int,
    routed: QuantFormat,
    shared: QuantFormat,
    op: Callable[..., object] = moe,
) -> OpCase:
    """One case; ``op`` has the signature of ``moe``."""
    width, inner = GEOMETRIES[model]
    distinct = _DISTINCT[tokens]
    shapes = ((inner, width), (width, inner), (inner, width))
    nbytes = sum(packed_bytes(routed, (distinct, *shape)) + packed_bytes(shared, shape) for shape in shapes)
    activations = 4 * tokens * width

    def make(index: int) -> Callable[[], object]:
        experts = ExpertWeights(*(random_weight(routed, (distinct, *shape)) for shape in shapes))
        common = ExpertWeights(*(random_weight(shared, shape) for shape in shapes))
        x_TE = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        ids_TP = (torch.arange(tokens * PER_TOKEN, device="cuda") % distinct).view(tokens, PER_TOKEN)
        weights_TP = torch.rand(tokens, PER_TOKEN, device="cuda")
        return lambda: op(x_TE, ids_TP, weights_TP, experts, common, LIMIT)

    flops = 6 * tokens * width * inner * (PER_TOKEN + 1)
    name = f"{model} T={tokens}, {distinct} experts {routed.value}, shared {shared.value}"
    return OpCase("moe", name, make, nbytes + activations, flops, nbytes)


def random_weight(format: QuantFormat, shape: tuple[int, ...]) -> PackedWeight:
    """Random codes and moderate random scales in the packed layout, without a detour over float32."""
    *stack, rows, columns = shape
    tiles, chunks = padded(rows) // 16, padded(columns) // chunk_columns(format)
    data = torch.randint(0, 256, (*stack, tiles, chunks, 32, 16), dtype=torch.uint8, device="cuda")
    block_scale = global_scale = None
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
        values = torch.randn(*stack, tiles, chunks, 32, 8, dtype=torch.bfloat16, device="cuda") * 0.02
        data = values.view(torch.uint8)
    return PackedWeight(data, block_scale, global_scale, format, shape)
