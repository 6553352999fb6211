"""Router of a prefill chunk: logits, selection and weights. A decode step routes in ``moe``."""

from collections.abc import Callable, Iterator

import torch

from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase
from dsv4.ops.router import Router
from dsv4.ops.router.prefill import route
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantTensor

GEOMETRIES = {"Flash": (4096, 256, 1.5), "Pro": (7168, 384, 2.5)}


def cases() -> Iterator[OpCase]:
    """A prefill chunk of 4,096 tokens."""
    for model in GEOMETRIES:
        yield _case(model, 4096)


def _case(model: str, tokens: int) -> OpCase:
    width, experts, scaling = GEOMETRIES[model]
    nbytes = 2 * width * (experts + tokens)

    def make(index: int) -> Callable[[], object]:
        x_TE = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(experts, width, dtype=torch.bfloat16, device="cuda") * width**-0.5
        bias_X = torch.randn(experts, device="cuda")
        router = Router(pack_weight(QuantTensor.dense(weight)), bias_X, False, 6, scaling)
        tokens_T = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        return TimedOp(route, x_TE, tokens_T, router).run

    flops = 2 * tokens * width * experts
    return OpCase("route", f"{model} T={tokens}", make, nbytes, flops, nbytes)
