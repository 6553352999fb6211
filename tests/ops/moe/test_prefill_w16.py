"""Recorded experts for Blackwell with 16-bit activations: which products they take, and what their
kernels are called with.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import prefill_w16 as linear_w16
from dsv4.ops.linear.cutedsl.gemm_config import W16Config
from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from dsv4.ops.moe import ExpertWeights, prefill, prefill_w16
from dsv4.weights.packed import PackedWeight
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4
from tests.ops.linear.meta import names as recorded_names
from tests.ops.linear.w16_problems import (
    EXPERTS,
    LIMIT,
    PER_TOKEN,
    W16Case,
    machine_gemm,
    make_ids,
    make_tokens,
    make_weight,
    reference,
    sort_pairs,
)
from tests.ops.moe.meta_layer import FLASH, GEOMETRIES, PRO, Geometry, step
from tests.ops.recorded import BLACKWELL, HOPPER

ROUTE = ["prefill_linear", "router_select"]


class Gemms:
    """Stands for the compiled kernels: notes the configuration and the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[W16Config, tuple[Any, ...]]] = []

    def load(self, config: W16Config, _: str) -> Any:
        return lambda *arguments: self.calls.append((config, arguments))


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """As if the package were installed."""
    found = Gemms()
    monkeypatch.setattr(linear_w16, "INSTALLED", True)
    monkeypatch.setattr(linear_w16, "load_gemm", found.load)
    return found


def recorded(geometry: Geometry, target: Target, tokens: int, exact: bool = True) -> Recording:
    """A layer; ``exact``: FP8 block scales are powers of two."""
    recording = Recording(target, tokens)
    inputs = step(recording, geometry)
    experts, shared = (
        ExpertWeights(*(replace(weight, power_of_two_scales=exact) for weight in weights_of(group)))
        for group in geometry.weights()
    )
    y_TE, _, _ = prefill_w16.moe(recording, *inputs, geometry.router(), experts, shared, LIMIT)
    assert (tuple(y_TE.shape), y_TE.dtype) == ((tokens, geometry.width), torch.bfloat16)
    return recording


def weights_of(group: ExpertWeights[PackedWeight]) -> tuple[PackedWeight, ...]:
    return group.w1, group.w2, group.w3


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_products_of_a_chunk(gemms: Gemms, geometry: Geometry) -> None:
    """The experts' always, the shared w2's and the gate's from 128 tokens on."""
    for tokens in (9, 127, 600):
        names = recorded_names(recorded(geometry, BLACKWELL, tokens))
        long = ["call"] if tokens >= 128 else []
        part = ["moe_sort", "call", "call", "call", "prefill_linear", *long, "moe_combine"]
        assert names == [ROUTE[0], *long, ROUTE[1], *part]


@pytest.mark.parametrize("geometry", [FLASH, PRO], ids=["flash", "pro"])
def test_what_kernels_do_not_take_is_portable(gemms: Gemms, geometry: Geometry) -> None:
    plain = Recording(HOPPER, 128)
    inputs = step(plain, geometry)
    prefill.moe(plain, *inputs, geometry.router(), *geometry.weights(), LIMIT)
    assert recorded_names(recorded(geometry, HOPPER, 128)) == recorded_names(plain)
    # A shared expert of FP8 whose scales are no powers of two.
    names = recorded_names(recorded(geometry, BLACKWELL, 600, exact=False))
    part = ["moe_sort", "call", "call", "prefill_gate_up", "prefill_linear", "moe_combine"]
    assert names == [ROUTE[0], "call", ROUTE[1], *part]


def test_calls_are_for_the_tokens_of_a_step(gemms: Gemms) -> None:
    """Also in a recording of a longer chunk; short experts have half tiles."""
    recording = recorded(FLASH, BLACKWELL, 4096)
    calls = [item for item in recording.items if isinstance(item, Call)]
    for tokens, tile in ((4096, 128), (500, 64)):
        gemms.calls.clear()
        for call in calls[1:4]:
            call.function(tokens, *call.tensors)
        pairs = tokens * FLASH.per_token
        most = pairs // 128 + min(FLASH.experts, pairs)
        (config, gate_up), (down_config, down), (shared_config, shared) = gemms.calls
        assert (config.gated, config.sorted, config.tile_tokens) == (True, True, tile)
        assert (down_config.gated, down_config.sorted) == (False, True)
        assert down_config.out_dtype == torch.float32
        assert (shared_config.gated, shared_config.sorted) == (True, False)
        sizes = [tuple(part.shape) for part in gate_up if isinstance(part, Tensor)]
        w1 = [(256, 128, 64, 512), (256, 128, 64, 64), (256,)]
        lists = [(most, 4), (1,), (pairs,), (pairs,)]
        assert sizes == [(tokens, 1, 4096), *w1, *w1, *lists, (pairs, 1, 2048)]
        assert gate_up[-2:] == (LIMIT, FLASH.per_token)
        sizes = [tuple(part.shape) for part in down if isinstance(part, Tensor)]
        w2 = [(256, 256, 32, 512), (256, 256, 32, 64), (256,)]
        assert sizes[:7] == [(pairs, 1, 2048), *w2, *w2]
        assert sizes[7:10] == lists[:3]
        assert sizes[-1] == (pairs, 1, 4096)
        sizes = [tuple(part.shape) for part in shared if isinstance(part, Tensor)]
        # FP8: one scale per 128 rows and columns.
        w1 = [(1, 128, 128, 512), (1, 16, 32), (1, 128, 128, 512)]
        assert sizes[:4] == [(tokens, 1, 4096), *w1]
        assert sizes[-1] == (tokens, 1, 2048)


def test_rows_of_any_width_are_strides_that_tma_takes(gemms: Gemms) -> None:
    """Multiples of 16 bytes, that of the only group as well."""
    geometry = Geometry(100, 33, 5, 3, (BF16, BF16))
    recording = recorded(geometry, BLACKWELL, 200)
    for call in (item for item in recording.items if isinstance(item, Call)):
        call.function(150, *call.tensors)
    # The gate, the routed experts' two products and the shared expert's.
    assert len(gemms.calls) == 5
    for _, (x, *_) in gemms.calls:
        assert [step % 8 for step in x.stride()] == [0, 0, 1]


def run_in_the_machine(recording: Recording, tokens: int) -> Tensor:
    """What the last call of a recording writes, poison behind it."""
    call = recording.items[-1]
    assert isinstance(call, Call)
    *tensors, result = call.tensors
    memory = torch.full((result.shape[0], result.stride(0)), torch.nan, dtype=result.dtype)
    y = memory[:, : result.shape[1]]
    call.function(tokens, *tensors, y)
    return y


def equal(found: Tensor, expected: Tensor) -> bool:
    rounded = expected[:, 0].float().to(found.dtype)
    return torch.equal(found.nan_to_num(7.5), rounded.nan_to_num(7.5))


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
def test_recorded_experts_in_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From packed stacks and sorted pairs to hidden rows and products."""
    monkeypatch.setattr(linear_w16, "load_gemm", machine_gemm)
    generator = torch.Generator().manual_seed(0)
    ids_TP = make_ids(12, generator)
    pairs = sort_pairs(ids_TP)
    routing = torch.rand(ids_TP.shape, generator=generator)
    recording = Recording(Target(torch.device("cpu"), "sm_100a", 148), 12)
    case = W16Case("gate_up", NVFP4, 12, 72, 96)
    w1, w3 = (make_weight(case, (EXPERTS, 72, 96), generator) for _ in range(2))
    x = make_tokens(case, 12, generator)
    prefill_w16.gate_up(recording, x[:, 0], w1, w3, LIMIT, pairs, routing)
    expected = reference(case, x.double(), [w1, w3], ids_TP, routing)
    assert equal(run_in_the_machine(recording, 12), expected)

    case = W16Case("down", MXFP4, 12, 40, 96, torch.float32)
    w2 = make_weight(case, (EXPERTS, 40, 96), generator)
    hidden = make_tokens(case, 12 * PER_TOKEN, generator)
    prefill_w16.down(recording, hidden[:, 0], w2, pairs)
    expected = reference(case, hidden.double(), [w2], ids_TP, routing)
    assert equal(run_in_the_machine(recording, 12), expected)


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
def test_a_recorded_shared_expert_in_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_w16, "load_gemm", machine_gemm)
    generator = torch.Generator().manual_seed(0)
    case = W16Case("shared", FP8, 12, 72, 200)
    w1, w3 = (make_weight(case, (72, 200), generator) for _ in range(2))
    x = make_tokens(case, 12, generator)
    recording = Recording(Target(torch.device("cpu"), "sm_100a", 148), 12)
    prefill_w16.gate_up(recording, x[:, 0], w1, w3, LIMIT)
    found = run_in_the_machine(recording, 10)
    ids_TP = make_ids(12, generator)
    expected = reference(case, x.double(), [w1, w3], ids_TP, torch.ones(12, PER_TOKEN))
    assert equal(found[:10], expected[:10])
    assert bool(found[10:].isnan().all())
