"""Router of a prefill chunk: logits, selection and weights of one layer. A decode step routes in ``moe``."""

from collections.abc import Callable, Iterator

import torch

from dsv4.ops.op_case import OpCase
from dsv4.ops.router import Router
from dsv4.ops.router.cuda import route
from dsv4.quant import QuantTensor
from dsv4.weights.packed import pack_weight

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
        gate, bias_X = pack_weight(QuantTensor.dense(weight)), torch.randn(experts, device="cuda")
        router, tokens_T = (
            Router(gate, bias_X, False, 6, scaling),
            torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        )
        return lambda: route(x_TE, tokens_T, router)

    return OpCase("route", f"{model} T={tokens}", make, nbytes, 2 * tokens * width * experts, nbytes)
