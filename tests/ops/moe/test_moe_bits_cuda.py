"""The decode experts give a token the same bits in steps of every length, beside any other tokens,
wherever it stands: routes, hidden rows and sums.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.bench import random_weight
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight
from dsv4.weights.quant import QuantFormat
from tests.ops.moe.decode_cases import (
    BF16,
    LIMIT,
    MXFP4,
    PAIRS,
    listing,
    moe_with_routes,
    step,
)

pytestmark = pytest.mark.gpu

TOKENS = 8
PER_TOKEN = 6
EXPERTS = TOKENS * PER_TOKEN
# Width and inner size. On two and four ranks every expert is cut.
SHAPES = {
    "flash": (4096, 2048),
    "pro": (7168, 3072),
    "half of flash": (4096, 1024),
    "quarter of pro": (7168, 768),
    "demo": (256, 128),
    "ragged": (352, 160),
    "wide": (2080, 1024),
}
CASES = [
    *((shape, pair) for shape in ("flash", "pro") for pair in (PAIRS[0], PAIRS[1], PAIRS[4])),
    *(("demo", pair) for pair in PAIRS),
    *((shape, PAIRS[0]) for shape in ("half of flash", "quarter of pro", "wide")),
    ("ragged", (MXFP4, BF16)),
]


def steps() -> Iterator[list[int]]:
    """Steps of every length, and of the same tokens at other places beside other ones."""
    for count in range(2, TOKENS + 1):
        yield list(range(count))
        yield list(range(TOKENS - 1, TOKENS - 1 - count, -1))
    yield [5, 0, 7]


def routings(router: Router[PackedWeight]) -> dict[str, tuple[Tensor, Router[PackedWeight]]]:
    """Token ids and routers: as the gate chooses, all tokens to the same experts, no two to the
    same, and experts that are listed twice or do not exist.
    """
    same = torch.tensor([[47, 0, 5, 9, 31, 32]], device="cuda").repeat(TOKENS, 1)
    apart = torch.arange(EXPERTS, device="cuda").flip(0).view(TOKENS, PER_TOKEN)
    odd = apart.clone()
    odd[1] = torch.tensor([2, 2, 7, 1, 1, 1])
    odd[3] = torch.tensor([-1, EXPERTS, 7, 0, 2, 7])
    return {
        "gate": (torch.zeros(TOKENS, dtype=torch.int64, device="cuda"), router),
        "same": listing(same, router),
        "apart": listing(apart, router),
        "odd": listing(odd, router),
    }


def stack(format: QuantFormat, width: int, inner: int, *count: int) -> ExpertWeights:
    """Random experts."""
    shapes = ((inner, width), (width, inner), (inner, width))
    return ExpertWeights(*(random_weight(format, (*count, *shape)) for shape in shapes))


def rows(x_TE: Tensor, tokens: list[int], *layer: Any) -> list[Tensor]:
    """y, ids and weights of a step of these tokens."""
    tokens_T, routes, experts, shared = layer
    arguments = (x_TE[tokens], tokens_T[tokens], routes, experts, shared, LIMIT)
    return [tensor.clone() for tensor in moe_with_routes(*arguments)]


@pytest.mark.parametrize(
    ("shape", "formats"),
    CASES,
    ids=[f"{shape} {pair[0].value}+{pair[1].value}" for shape, pair in CASES],
)
def test_bits_go_with_the_token_alone(shape: str, formats: tuple[QuantFormat, QuantFormat]) -> None:
    width, inner = SHAPES[shape]
    torch.manual_seed(3)
    weights = (stack(formats[0], width, inner, EXPERTS), stack(formats[1], width, inner))
    x_TE, _, router = step(width, EXPERTS, TOKENS, PER_TOKEN)
    for name, routing in routings(router).items():
        layer = (*routing, *weights)
        single = [rows(x_TE, [token], *layer) for token in range(TOKENS)]
        alone = [torch.cat(parts) for parts in zip(*single, strict=True)]
        assert bool(alone[0].isfinite().all())
        for tokens in steps():
            for found, expected in zip(rows(x_TE, tokens, *layer), alone, strict=True):
                assert torch.equal(found, expected[tokens]), f"{name}: {tokens}"
