"""Recorded products for Blackwell with 16-bit activations: which they take, which they leave, and
what their kernels are called with.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import prefill, prefill_w16
from dsv4.ops.linear.cutedsl.gemm_config import W16Config
from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import (
    BF16,
    FP8,
    NVFP4,
    TARGETS,
    activations,
    names,
    shapes,
    stored,
)
from tests.ops.linear.products import record_everything
from tests.ops.linear.w16_problems import (
    W16Case,
    expected_products,
    machine_gemm,
    make_tokens,
    make_weight,
)

HOPPER, BLACKWELL = TARGETS


class Gemms:
    """Stands for the compiled kernels: notes which one was called with which shapes."""

    def __init__(self) -> None:
        self.calls: list[tuple[W16Config, list[tuple[int, ...]]]] = []

    def load(self, config: W16Config, architecture: str) -> Any:
        assert architecture == "sm_100a"
        return lambda *arguments: self.calls.append(
            (config, [tuple(part.shape) for part in arguments if isinstance(part, torch.Tensor)])
        )


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """As if the package were installed."""
    found = Gemms()
    monkeypatch.setattr(prefill_w16, "INSTALLED", True)
    monkeypatch.setattr(prefill_w16, "load_gemm", found.load)
    return found


def test_products_of_128_tokens_and_more(gemms: Gemms) -> None:
    """For fewer the portable launch runs, with the shape that it has alone."""
    weight = pack_weight(stored(NVFP4, 200, 1024))
    recording = Recording(BLACKWELL, 500)
    plain = Recording(BLACKWELL, 500)
    y = prefill_w16.linear(recording, activations(recording, 1024), weight, torch.float32)
    prefill.linear(plain, activations(plain, 1024), weight, torch.float32)
    assert (tuple(y.shape), y.dtype) == ((500, 200), torch.float32)
    assert names(recording) == ["prefill_linear", "call"]
    call = recording.items[1]
    assert isinstance(call, Call)
    for tokens in (9, 127):
        assert shapes(recording, tokens) == shapes(plain, tokens)
        call.function(tokens, *call.tensors)
    assert gemms.calls == []
    call.function(300, *call.tensors)
    assert shapes(recording, 300) == []
    ((config, found),) = gemms.calls
    assert (config.tile_tokens, config.sides, config.multiprocessors) == (64, 1, 148)
    matrix = [(1, 16, 16, 512), (1, 16, 16, 64), (1,)]
    assert found == [(300, 1, 1024), *matrix, *matrix, *[matrix[0]] * 4, (300, 1, 200)]


def test_the_kernel_follows_the_tokens_of_a_step(gemms: Gemms) -> None:
    weight = pack_weight(stored(BF16, 4096, 128))
    recording = Recording(BLACKWELL, 2048)
    prefill_w16.linear(recording, activations(recording, 128), weight)
    call = recording.items[1]
    assert isinstance(call, Call)
    for tokens in (128, 2048):
        call.function(tokens, *call.tensors)
    assert [config.sides for config, _ in gemms.calls] == [1, 2]


def test_it_leaves_to_the_other_form_what_it_does_not_take(gemms: Gemms) -> None:
    fp8 = stored(FP8, 256, 1024)
    floats = replace(fp8, block_scale=torch.empty((2, 8), device="meta"))
    cases = [
        (HOPPER, 128, stored(NVFP4, 256, 1024)),
        (BLACKWELL, 127, stored(NVFP4, 256, 1024)),
        (BLACKWELL, 500, floats),
    ]
    for target, tokens, matrix in cases:
        recording = Recording(target, tokens)
        x = activations(recording, 1024)
        prefill_w16.linear(recording, x, pack_weight(matrix))
        assert names(recording) == ["prefill_linear"], (target.architecture, tokens)
    recording = Recording(BLACKWELL, 500)
    prefill_w16.linear(recording, activations(recording, 1024), pack_weight(fp8))
    assert names(recording) == ["prefill_linear", "call"]


@pytest.mark.parametrize("most", [100, 600])
def test_every_product_is_recorded(gemms: Gemms, most: int) -> None:
    recording = Recording(BLACKWELL, most)
    record_everything(prefill_w16, recording)
    plain = Recording(BLACKWELL, most)
    record_everything(prefill, plain)
    calls = names(recording).count("call") - names(plain).count("call")
    assert (calls > 0) == (most >= 128)
    for tokens in (9, 10, 100):
        exact = Recording(BLACKWELL, tokens)
        record_everything(prefill, exact)
        assert shapes(recording, tokens) == shapes(exact, tokens)


def test_without_the_package_it_is_the_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_w16, "INSTALLED", False)
    recording = Recording(BLACKWELL, 500)
    weight = pack_weight(stored(NVFP4, 256, 1024))
    prefill_w16.linear(recording, activations(recording, 1024), weight)
    assert names(recording) == ["prefill_linear"]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    ("format", "groups", "features"), [(NVFP4, 1, 40), (FP8, 2, 48), (BF16, 2, 16)]
)
def test_the_recorded_call_in_the_machine(
    format: QuantFormat, groups: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From packed weights to results, for a chunk and a shorter one."""
    monkeypatch.setattr(prefill_w16, "load_gemm", machine_gemm)
    case = W16Case("dense", format, 140, features, 64, groups=groups)
    generator = torch.Generator().manual_seed(0)
    weight = make_weight(case, (groups * features, case.columns), generator)
    x = make_tokens(case, case.tokens, generator)
    recording = Recording(Target(torch.device("cpu"), "sm_100a", 148), case.tokens)
    prefill_w16.grouped_linear(recording, x, weight)
    call = recording.items[-1]
    assert isinstance(call, Call)
    expected = expected_products(case, x.double(), weight)
    for tokens in (140, 129):
        y = torch.full((140, groups, features), torch.nan, dtype=torch.bfloat16)
        call.function(tokens, *call.tensors[:-1], y)
        assert torch.equal(y[:tokens], expected[:tokens].float().bfloat16())
        assert bool(y[tokens:].isnan().all())
