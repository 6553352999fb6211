"""Mixture of experts: clamped SwiGLU, routing weight before the rounding, shared expert."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.ops.moe import ExpertWeights, expert_sum, moe
from dsv4.ops.router import Router, route
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.cases import (
    TINY_CONFIG,
    VECTORS,
    OpsUnderTest,
    assert_near,
    integers,
    normal,
    positions,
    tiny_config,
)

LIMIT = 10.0
# Relative, where w2 is the identity: the hidden value is rounded once, and the sum exact.
ROUNDED_HIDDEN = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def stack(
    ops: OpsUnderTest,
    experts: int,
    width: int,
    inner: int,
    seed: int,
    format: QuantFormat,
    scale: float = 0.3,
):
    shapes = ((experts, inner, width), (experts, width, inner), (experts, inner, width))
    parts = [
        quantize(normal(*shape, seed=seed + i, scale=scale), format)
        for i, shape in enumerate(shapes)
    ]
    return ExpertWeights(*map(ops.pack_weight, parts))


def one(ops: OpsUnderTest, w1: Tensor, w2: Tensor, w3: Tensor) -> ExpertWeights:
    return ExpertWeights(*(ops.pack_weight(QuantTensor.dense(w)) for w in (w1, w2, w3)))


def zero_expert(ops: OpsUnderTest, width: int, inner: int) -> ExpertWeights:
    return one(ops, torch.zeros(inner, width), torch.zeros(width, inner), torch.zeros(inner, width))


def listing(
    ops: OpsUnderTest, ids_TP: Tensor, gate_XE: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Router]:
    """Token ids and a router that send token t to the experts ``ids_TP[t]``; a gate of zeros gives
    equal weights.
    """
    gate = ops.pack_weight(QuantTensor.dense(gate_XE))
    return positions(*range(ids_TP.shape[0])), Router(gate, ids_TP, True, ids_TP.shape[1], scaling)


def to_expert_0(ops: OpsUnderTest, width: int, weight: float = 1.0) -> tuple[Tensor, Router]:
    """One token, the first expert of one."""
    return listing(ops, positions(0)[None], torch.zeros(1, width), weight)


def exact_expert(x: Tensor, matrices: list[Tensor], weight: float) -> Tensor:
    w1, w2, w3 = matrices
    gate = (w1.double() @ x.double()).clamp(max=LIMIT)
    up = (w3.double() @ x.double()).clamp(-LIMIT, LIMIT)
    hidden = gate / (1 + torch.exp(-gate)) * up * weight
    return w2.double() @ hidden.to(x.dtype).double()


@pytest.mark.parametrize(
    "format", [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.BF16], ids=lambda f: f.value
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1.5e-6), (torch.bfloat16, 4e-3)])
def test_sum_of_selected_experts_and_the_shared_one(
    ops: OpsUnderTest, format: QuantFormat, dtype: torch.dtype, bound: float
) -> None:
    experts = stack(ops, 8, 64, 32, 1, format)
    shared = stack(ops, 1, 64, 32, 9, format)
    shared = ExpertWeights(shared.w1[0], shared.w2[0], shared.w3[0])
    x_TE = normal(7, 64, seed=4, dtype=dtype)
    ids_TP = integers(0, 7, 7, 3, seed=5, dtype=torch.int64)
    tokens_T, router = listing(
        ops, ids_TP, normal(8, 64, seed=6, dtype=torch.bfloat16, scale=0.3), 1.5
    )
    y_TE, _, _ = ops.moe(x_TE, tokens_T, router, experts, shared, LIMIT)
    assert y_TE.dtype == dtype
    _, weights_TP = route(x_TE, tokens_T, router)
    dense = [part.dequantize() for part in (experts.w1, experts.w2, experts.w3)]
    for t, x in enumerate(x_TE):
        exact = exact_expert(
            x, [shared.w1.dequantize(), shared.w2.dequantize(), shared.w3.dequantize()], 1.0
        )
        for expert, weight in zip(ids_TP[t].tolist(), weights_TP[t].tolist(), strict=True):
            exact = exact + exact_expert(x, [part[expert] for part in dense], weight)
        assert_near(y_TE[t], exact, bound)


def clamped_pairs(
    ops: OpsUnderTest, dtype: torch.dtype, gate: list[float], up: list[float], shared: bool
) -> list[float]:
    """h of one expert for given pre-activations: x = (1, 0, …), w1 and w3 hold the values, w2 is
    the identity.
    """
    n = len(gate)
    w1 = torch.zeros(n, n)
    w3 = torch.zeros(n, n)
    w1[:, 0] = torch.tensor(gate)
    w3[:, 0] = torch.tensor(up)
    silent = torch.zeros(n, n)
    active = (w1, torch.eye(n), w3)
    routed, common = ((silent,) * 3, active) if shared else (active, (silent,) * 3)
    experts = one(ops, *(w[None] for w in routed))
    shared_expert = one(ops, *common)
    x_TE = torch.eye(1, n, dtype=dtype)
    found = ops.moe(x_TE, *to_expert_0(ops, n), experts, shared_expert, LIMIT)
    return found.y_TE[0].tolist()


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_published_clamped_swiglu(ops: OpsUnderTest, shared: bool) -> None:
    case = VECTORS["clamped_swiglu"]
    found = clamped_pairs(ops, torch.float32, case["gate"], case["up"], shared)
    assert found == pytest.approx(case["h"], abs=1e-6)


def test_spec11_d24_the_shared_expert_is_clamped_too(ops: OpsUnderTest, dtype: torch.dtype) -> None:
    silu = LIMIT / (1 + math.exp(-LIMIT))
    assert clamped_pairs(ops, dtype, [50.0, 50.0], [50.0, -50.0], shared=True) == pytest.approx(
        [silu * 10, -silu * 10], rel=ROUNDED_HIDDEN[dtype]
    )


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_gate_is_not_clamped_from_below_and_silu_times_up_not_at_all(
    ops: OpsUnderTest, dtype: torch.dtype, shared: bool
) -> None:
    found = clamped_pairs(ops, dtype, [-12.0, 9.0], [1.0, 9.0], shared)
    exact = [-12 / (1 + math.exp(12)), 81 / (1 + math.exp(-9))]
    assert found == pytest.approx(exact, rel=ROUNDED_HIDDEN[dtype])


def test_routing_weight_multiplies_before_the_rounding(ops: OpsUnderTest) -> None:
    """With w2 the identity the output is round(h · weight), not round(h) · weight rounded again."""
    n = 64
    w1 = normal(n, n, seed=1, dtype=torch.bfloat16)
    w3 = normal(n, n, seed=2, dtype=torch.bfloat16)
    expert = one(ops, w1[None], torch.eye(n)[None], w3[None])
    x = normal(1, n, seed=3, dtype=torch.bfloat16, scale=0.1)
    found = ops.moe(x, *to_expert_0(ops, n, 0.3), expert, zero_expert(ops, n, n), LIMIT)
    y = found.y_TE[0]
    gate = w1.double() @ x[0].double()
    up = w3.double() @ x[0].double()
    hidden = gate / (1 + torch.exp(-gate)) * up
    right = (hidden * 0.3).to(torch.bfloat16)
    wrong = (hidden.to(torch.bfloat16).double() * 0.3).to(torch.bfloat16)
    assert int((y != right).sum()) <= 1, "float32 arithmetic may flip one rounding"
    assert int((wrong != right).sum()) > 5


@pytest.mark.parametrize(
    "format",
    [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128],
    ids=lambda f: f.value,
)
def test_spec11_d25_quantised_experts_are_clamped(
    ops: OpsUnderTest, dtype: torch.dtype, format: QuantFormat
) -> None:
    """Pre-activations of 96 and −96: the routed and the shared expert each give ± silu(10) · 10."""
    width = 128
    w1 = torch.zeros(width, width)
    w3 = torch.zeros(width, width)
    w1[:, 0] = 6.0
    w3[::2, 0] = 6.0
    w3[1::2, 0] = -6.0
    w1, w2, w3 = (quantize(matrix, format) for matrix in (w1, torch.eye(width), w3))
    stacked = (quantize(matrix.dequantize()[None], format) for matrix in (w1, w2, w3))
    experts = ExpertWeights(*map(ops.pack_weight, stacked))
    shared = ExpertWeights(*map(ops.pack_weight, (w1, w2, w3)))
    x_TE = 16 * torch.eye(1, width, dtype=dtype)
    y = ops.moe(x_TE, *to_expert_0(ops, width, 0.5), experts, shared, LIMIT).y_TE[0]
    silu_limit = LIMIT / (1 + math.exp(-LIMIT)) * LIMIT
    exact = [1.5 * silu_limit, -1.5 * silu_limit]
    assert y[:2].tolist() == pytest.approx(exact, rel=2 * ROUNDED_HIDDEN[dtype])


def test_spec11_d26_the_limit_is_required_and_the_one_of_the_config(ops: OpsUnderTest) -> None:
    raw = {key: value for key, value in TINY_CONFIG.items() if key != "swiglu_limit"}
    with pytest.raises(UserError, match="swiglu_limit"):
        ModelConfig.from_dict(raw)
    with pytest.raises(UserError, match="scoring_func"):
        tiny_config(scoring_func="sigmoid")
    assert tiny_config(swiglu_limit=7.0).swiglu_limit == 7.0
    w = torch.full((1, 1), 100.0)
    nothing = one(ops, *(torch.zeros(1, 1, 1),) * 3)
    for limit in (7.0, 10.0):
        y = ops.moe(
            torch.ones(1, 1), *to_expert_0(ops, 1), nothing, one(ops, w, torch.ones(1, 1), w), limit
        ).y_TE
        assert float(y) == pytest.approx(limit / (1 + math.exp(-limit)) * limit)


def test_an_expert_listed_twice_counts_twice_and_unlisted_experts_not_at_all(
    ops: OpsUnderTest, dtype: torch.dtype
) -> None:
    experts = stack(ops, 4, 32, 16, 20, QuantFormat.BF16)
    shared = zero_expert(ops, 32, 16)
    x_TE = normal(1, 32, seed=21, dtype=dtype)
    gate_XE = torch.zeros(4, 32)
    twice = ops.moe(
        x_TE, *listing(ops, torch.tensor([[2, 2]]), gate_XE, 0.75), experts, shared, LIMIT
    )
    once = ops.moe(x_TE, *listing(ops, torch.tensor([[2]]), gate_XE, 0.75), experts, shared, LIMIT)
    # Half the weight twice is exact where each half rounds as the whole.
    assert_near(twice.y_TE, once.y_TE.double(), ROUNDED_HIDDEN[dtype])


def test_experts_are_summed_in_ascending_order_behind_the_shared_one() -> None:
    """(1 + 2^24) − 2^24 is 0 in float32, (1 − 2^24) + 2^24 and (2^24 − 2^24) + 1 are 1."""
    up = torch.zeros(1, 8, 8)
    up[:, 0, 0] = 0.8
    gate = torch.full((1, 8, 8), 20.0)
    h = torch.nn.functional.silu(torch.tensor(LIMIT)).item() * 0.8

    def experts(*results: float) -> ExpertWeights:
        w2 = torch.stack([torch.eye(8) * result / 8 for result in results])
        copies = len(results)
        parts = (gate.expand(copies, -1, -1), w2, up.expand(copies, -1, -1))
        return ExpertWeights(*(QuantTensor.dense(part.contiguous()) for part in parts))

    assert torch.tensor(h).bfloat16() == 8
    shared = experts(1.0)
    shared = ExpertWeights(shared.w1[0], shared.w2[0], shared.w3[0])
    x_TE = torch.eye(1, 8, dtype=torch.bfloat16)
    for ids in ([0, 1], [1, 0]):
        routed = positions(*ids)[None], torch.ones(1, 2)
        y_TE = expert_sum(x_TE, *routed, experts(2.0**24, -(2.0**24)), shared, LIMIT)
        assert y_TE[0, 0] == 0
    other = expert_sum(x_TE, *routed, experts(-(2.0**24), 2.0**24), shared, LIMIT)
    assert other[0, 0] == 1


def test_the_term_of_a_rank_is_not_rounded() -> None:
    experts, shared = (
        ExpertWeights(
            *(QuantTensor.dense(normal(*stack, 8, 8, seed=seed + part)) for part in range(3))
        )
        for stack, seed in (((4,), 1), ((), 5))
    )
    router = Router(QuantTensor.dense(normal(4, 8, seed=9)), torch.zeros(4), False, 2, 1.0)
    arguments = normal(3, 8, seed=10, dtype=torch.bfloat16), positions(0, 1, 2), router
    term_TE, *_ = moe(*arguments, experts, shared, LIMIT, torch.float32)
    rounded_TE, *_ = moe(*arguments, experts, shared, LIMIT)
    assert term_TE.dtype == torch.float32
    assert torch.equal(term_TE.bfloat16(), rounded_TE)
    assert not torch.equal(term_TE, rounded_TE.float())


def test_tokens_do_not_mix(ops: OpsUnderTest, dtype: torch.dtype) -> None:
    """A NaN token makes its own row NaN and no other, also where tokens share experts."""
    experts = stack(ops, 4, 32, 16, 30, QuantFormat.NVFP4)
    shared = ExpertWeights(
        *(
            QuantTensor.dense(w.dequantize()[0].bfloat16())
            for w in (experts.w1, experts.w2, experts.w3)
        )
    )
    shared = ExpertWeights(*map(ops.pack_weight, (shared.w1, shared.w2, shared.w3)))
    x_TE = normal(6, 32, seed=31, dtype=dtype)
    ids_TP = integers(0, 1, 6, 2, seed=32, dtype=torch.int64)
    routing = listing(ops, ids_TP, normal(4, 32, seed=33, dtype=torch.bfloat16))
    clean = ops.moe(x_TE, *routing, experts, shared, LIMIT).y_TE
    x_TE[3] = torch.nan
    found = ops.moe(x_TE, *routing, experts, shared, LIMIT).y_TE
    assert bool(found[3].isnan().all())
    others = [0, 1, 2, 4, 5]
    assert_near(found[others], clean[others].double(), 1e-6)
