"""Router: logits, selection and weights of one layer."""

from collections.abc import Callable, Iterator

import torch

from dsv4.bench.op_case import OpCase
from dsv4.ops.cuda.packed import pack_weight
from dsv4.ops.cuda.router import route_learned
from dsv4.quant import QuantTensor

GEOMETRIES = {"Flash": (4096, 256, 1.5), "Pro": (7168, 384, 2.5)}


def cases() -> Iterator[OpCase]:
    """A decode step of 1 and 8 tokens, and a prefill chunk."""
    for model in GEOMETRIES:
        for tokens in (1, 8, 4096):
            yield _case(model, tokens)


def _case(model: str, tokens: int) -> OpCase:
    width, experts, scaling = GEOMETRIES[model]
    nbytes = 2 * width * (experts + tokens)

    def make(index: int) -> Callable[[], object]:
        x_TE = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(experts, width, dtype=torch.bfloat16, device="cuda") * width**-0.5
        gate, bias_X = pack_weight(QuantTensor.dense(weight)), torch.randn(experts, device="cuda")
        return lambda: route_learned(x_TE, gate, bias_X, 6, scaling)

    return OpCase("route_learned", f"{model} T={tokens}", make, nbytes, 2 * tokens * width * experts, nbytes)
