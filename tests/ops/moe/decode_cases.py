"""Weights and steps for the decode mixture of experts on a GPU, and float64 to compare with."""

import torch
from torch import Tensor

from dsv4.ops.immediate import immediately
from dsv4.ops.moe import ExpertWeights, decode
from dsv4.ops.router import Router
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import relative_error

moe_with_routes = immediately(decode.moe)
LIMIT = 10.0
NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
# Of routed and shared experts.
PAIRS = [
    (NVFP4, FP8),
    (MXFP4, FP8),
    (NVFP4, NVFP4),
    (FP8, FP8),
    (BF16, BF16),
    (NVFP4, BF16),
    (BF16, FP8),
    (FP8, MXFP4),
]


def moe(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
) -> Tensor:
    """The result alone."""
    return moe_with_routes(x_TE, tokens_T, router, experts, shared, limit).y_TE


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda")


def weights(
    width: int, inner: int, count: int, formats: tuple[QuantFormat, QuantFormat], seed: int = 1
):
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(format: QuantFormat, *stack: int) -> ExpertWeights:
        shapes = ((inner, width), (width, inner), (inner, width))
        matrices = (draw(generator, *stack, *shape) * shape[1] ** -0.5 for shape in shapes)
        return ExpertWeights(*(pack_weight(quantize(matrix, format)) for matrix in matrices))

    return one(formats[0], count), one(formats[1])


def step(
    width: int, count: int, tokens: int, per_token: int = 6, seed: int = 2
) -> tuple[Tensor, Tensor, Router]:
    """x, token ids and a learned router."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x_TE = draw(generator, tokens, width).bfloat16()
    gate = pack_weight(QuantTensor.dense((draw(generator, count, width) * width**-0.5).bfloat16()))
    bias_X = draw(generator, count)
    tokens_T = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    return x_TE, tokens_T, Router(gate, bias_X, False, min(per_token, count), 2.5)


def listing(ids_TP: Tensor, router: Router) -> tuple[Tensor, Router]:
    """Token ids and a router that sends token t to the experts ``ids_TP[t]``, with the weights of
    ``router``'s gate.
    """
    tokens_T = torch.arange(ids_TP.shape[0], device="cuda")
    return tokens_T, Router(router.gate, ids_TP, True, ids_TP.shape[1], router.scaling)


def exact(
    x_TE: Tensor, tokens_T: Tensor, router: Router, experts: ExpertWeights, shared: ExpertWeights
) -> Tensor:
    """float64, except for the one rounding of the hidden rows. The routes are those of the launch,
    which tests/ops and test_router.py check.
    """
    _, ids_TP, weights_TP = moe_with_routes(x_TE, tokens_T, router, experts, shared, LIMIT)

    def mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, weight: Tensor | float) -> Tensor:
        gate = (x.double() @ w1.double().T).clamp(max=LIMIT)
        up = (x.double() @ w3.double().T).clamp(-LIMIT, LIMIT)
        return (gate * torch.sigmoid(gate) * up * weight).bfloat16().double() @ w2.double().T

    total = mlp(x_TE, shared.w1.dequantize(), shared.w2.dequantize(), shared.w3.dequantize(), 1.0)
    for expert in ids_TP.unique().tolist():
        if not 0 <= expert < experts.w1.shape[0]:
            continue
        tokens, slots = (ids_TP == expert).nonzero(as_tuple=True)
        w1, w2, w3 = (part[expert].dequantize() for part in (experts.w1, experts.w2, experts.w3))
        total.index_add_(
            0, tokens, mlp(x_TE[tokens], w1, w2, w3, weights_TP[tokens, slots, None].double())
        )
    return total


def check(found: Tensor, expected: Tensor, note: str) -> None:
    """bf16 hidden rows may round the other way after float32 sums: that, and the final rounding, is
    the error.
    """
    error = relative_error(found, expected)
    worst = (found.double() - expected).abs().max() / expected.abs().max()
    print(f"{note}: relative error {error:.2e}, worst {float(worst):.2e}")
    assert error < 2.5e-3, f"{note}: relative error {error}, worst {float(worst)}"
