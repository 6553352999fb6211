"""Prefill products: dense and grouped linears, the mixture of experts and its grouped GEMM pair, on
real shapes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.immediate import TimedOp, immediately
from dsv4.ops.linear.prefill_long import grouped_linear, linear
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.bench import EXPERTS, GEOMETRIES, LIMIT, PER_TOKEN, random_weight
from dsv4.ops.moe.grouped import down, gate_up, sort_pairs
from dsv4.ops.moe.prefill import expert_sum
from dsv4.ops.moe.sorted_pairs import Sorted
from dsv4.ops.op_case import OpCase
from dsv4.weights.quant import QuantFormat, packed_bytes

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
# (rows, columns) of wq_b and wo_b.
DENSE = {"Flash": ((32768, 1024), (4096, 8192)), "Pro": ((65536, 1536), (7168, 16384))}


def cases() -> Iterator[OpCase]:
    """Dense products at 16 to 8192 tokens in every format, o_a, and the experts at 64 to 4096
    tokens.
    """
    for model, matrices in DENSE.items():
        for rows, columns in matrices:
            for format in (FP8, NVFP4):
                for tokens in (16, 512, 4096):
                    yield _linear(model, tokens, rows, columns, format)
    yield _linear("Flash", 4096, 4096, 8192, MXFP4)
    yield _linear("Flash", 4096, 4096, 8192, BF16)
    yield _grouped("Flash", 4096, 8, FP8)
    yield _grouped("Pro", 4096, 16, FP8)
    for tokens in (64, 512, 4096):
        yield _moe("Flash", tokens)
        yield _pair("Flash", tokens)
    yield _moe("Pro", 4096)


def _linear(model: str, tokens: int, rows: int, columns: int, format: QuantFormat) -> OpCase:
    def make(index: int) -> Callable[[], object]:
        weight = random_weight(format, (rows, columns))
        x = _x(tokens, columns)
        return TimedOp(linear, x, weight).run

    weight_bytes = packed_bytes(format, (rows, columns))
    io_bytes = 2 * tokens * (rows + columns)
    name = f"{model} {rows}x{columns} {format.value} T={tokens}"
    flops = 2 * tokens * rows * columns
    return OpCase(
        "prefill_linear", name, make, weight_bytes + io_bytes, flops, weight_bytes + io_bytes
    )


def _grouped(model: str, tokens: int, groups: int, format: QuantFormat) -> OpCase:
    rows = 1024
    columns = 4096

    def make(index: int) -> Callable[[], object]:
        weight = random_weight(format, (groups * rows, columns))
        x = _x(tokens, groups, columns)
        return TimedOp(grouped_linear, x, weight).run

    weight_bytes = packed_bytes(format, (groups * rows, columns))
    io_bytes = 2 * tokens * groups * (rows + columns)
    name = f"{model} o_a {groups}x{rows}x{columns} {format.value} T={tokens}"
    flops = 2 * tokens * groups * rows * columns
    return OpCase(
        "prefill_grouped_linear",
        name,
        make,
        weight_bytes + io_bytes,
        flops,
        weight_bytes + io_bytes,
    )


def _moe(model: str, tokens: int) -> OpCase:
    width, inner = GEOMETRIES[model]
    nbytes = _expert_bytes(model)
    flops = 6 * tokens * width * inner

    def make(index: int) -> Callable[[], object]:
        experts = _experts(model)
        shapes = ((inner, width), (width, inner), (inner, width))
        shared = ExpertWeights(*(random_weight(FP8, shape) for shape in shapes))
        x_TE, ids_TP, weights_TP = _routed(model, tokens)
        return TimedOp(expert_sum, x_TE, ids_TP, weights_TP, experts, shared, LIMIT).run

    name = f"{model} T={tokens}, {EXPERTS[model]} experts nvfp4, shared fp8"
    nbytes += 3 * width * inner + 4 * tokens * width
    return OpCase("moe_prefill", name, make, nbytes, flops * (PER_TOKEN + 1), nbytes)


def _pair(model: str, tokens: int) -> OpCase:
    """The two grouped GEMMs of the routed experts alone: useful FLOPs of tokens · 6 rows."""
    width, inner = GEOMETRIES[model]

    def make(index: int) -> Callable[[], object]:
        experts = _experts(model)
        x_TE, ids_TP, weights_TP = _routed(model, tokens)
        pairs = immediately(sort_pairs)(x_TE, ids_TP, EXPERTS[model])

        def both(recording: Recording, x_TE: Tensor, pairs: Sorted) -> Tensor:
            w1 = experts.w1
            w3 = experts.w3
            hidden = gate_up(recording, x_TE, w1, w3, LIMIT, pairs, weights_TP)
            return down(recording, hidden, experts.w2, pairs)

        return TimedOp(both, x_TE, pairs).run

    nbytes = _expert_bytes(model)
    rows = tokens * PER_TOKEN
    name = f"{model} T={tokens}, {rows} rows over {EXPERTS[model]} experts nvfp4"
    io_bytes = 2 * tokens * width + rows * (4 * inner + 4 * width)
    return OpCase(
        "grouped_gemm_pair", name, make, nbytes + io_bytes, 6 * rows * width * inner, nbytes
    )


def _experts(model: str) -> ExpertWeights:
    width, inner = GEOMETRIES[model]
    shapes = ((inner, width), (width, inner), (inner, width))
    return ExpertWeights(*(random_weight(NVFP4, (EXPERTS[model], *shape)) for shape in shapes))


def _expert_bytes(model: str) -> int:
    width, inner = GEOMETRIES[model]
    return 3 * packed_bytes(NVFP4, (EXPERTS[model], width, inner))


def _routed(model: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, expert ids uniform over the experts and distinct per token, routing weights."""
    width, _ = GEOMETRIES[model]
    ids_TP = torch.rand(tokens, EXPERTS[model], device="cuda").topk(PER_TOKEN, dim=1).indices
    return _x(tokens, width), ids_TP, torch.rand(tokens, PER_TOKEN, device="cuda")


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)
