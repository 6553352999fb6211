"""Recorded products with the CuTe DSL kernels: which they take and which they leave."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import cutedsl, prefill, prefill_cutedsl
from dsv4.weights.packed import pack_weight
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


class Gemms:
    """Stands for the compiled kernels: notes which one was called with how many tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def compile(self, recording: Recording, *_: object) -> tuple[Any, ...]:
        counts = range(128, recording.tokens + 16, 16)
        return tuple(
            lambda x, *rest, index=index: self.calls.append((index, x.shape[0], rest[-1].shape[0]))
            for index in range(len(counts))
        )


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """As if the package were installed."""
    found = Gemms()
    monkeypatch.setattr(prefill_cutedsl, "INSTALLED", True)
    monkeypatch.setattr(prefill_cutedsl, "gemms_for", found.compile)
    return found


def test_cutedsl_products_are_for_long_chunks(gemms: Gemms) -> None:
    """From 128 tokens on the other launch is left out, for fewer the CuTe DSL one."""
    weight = pack_weight(stored(NVFP4, 1024, 1024))
    recording = Recording(TARGETS[0], 500)
    plain = Recording(TARGETS[0], 500)
    y = prefill_cutedsl.linear(recording, activations(recording, 1024), weight)
    prefill.linear(plain, activations(plain, 1024), weight)
    assert y.shape == (500, 1024)
    assert names(recording) == ["prefill_linear", "call"]
    call = recording.items[1]
    assert isinstance(call, Call)
    assert storage_key(call.tensors[-1]) == storage_key(y)
    for tokens in (9, 100, 127):
        assert shapes(recording, tokens) == shapes(plain, tokens)
        call.function(tokens, *call.tensors)
    assert gemms.calls == []
    for tokens in (128, 129, 144, 145, 500):
        assert shapes(recording, tokens) == []
        call.function(tokens, *call.tensors)
    indices = {128: 0, 129: 1, 144: 1, 145: 2, 500: 24}
    assert gemms.calls == [(index, tokens, tokens) for tokens, index in indices.items()]


def test_cutedsl_leaves_to_the_other_form_what_it_does_not_take(gemms: Gemms) -> None:
    short = ["prefill_linear"]
    cases = [
        (TARGETS[1], 500, (1024, 1024), short),
        (TARGETS[0], 127, (1024, 1024), short),
        (TARGETS[0], 500, (1000, 1024), short),
        (TARGETS[0], 1025, (1024, 1000), [*short, "long_linear"]),
    ]
    for target, tokens, (rows, columns), expected in cases:
        recording = Recording(target, tokens)
        weight = pack_weight(stored(BF16, rows, columns))
        prefill_cutedsl.linear(recording, activations(recording, columns), weight)
        assert names(recording) == expected, (target.architecture, tokens, rows, columns)
    recording = Recording(TARGETS[0], 500)
    weight = pack_weight(stored(FP8, 4 * 32, 128))
    prefill_cutedsl.grouped_linear(recording, activations(recording, 4, 128), weight)
    assert names(recording) == ["prefill_linear"]


@pytest.mark.parametrize("most", [512, 2048])
def test_cutedsl_records_every_product(gemms: Gemms, most: int) -> None:
    recording = Recording(TARGETS[0], most)
    record_everything(prefill_cutedsl, recording)
    assert "call" in names(recording)
    for tokens in (9, 10, 100):
        exact = Recording(TARGETS[0], tokens)
        record_everything(prefill, exact)
        assert shapes(recording, tokens) == shapes(exact, tokens)


def test_spec11_j92_every_product_is_compiled_for_the_multiprocessors_of_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a part with 78 of them as well, and there is no number to fall back on."""
    counts: list[int] = []
    jit = SimpleNamespace(gemm_for=lambda *problem: counts.append(problem[-1]))
    monkeypatch.setattr(cutedsl, "jit", jit, raising=False)
    device = TARGETS[0].device
    weight = pack_weight(stored(NVFP4, 1024, 1024))
    for multiprocessors in (78, 132):
        counts.clear()
        recording = Recording(Target(device, "sm_90a", multiprocessors), 500)
        prefill_cutedsl.gemms_for(recording, weight, 1, torch.bfloat16)
        assert counts == [multiprocessors] * 25
    with pytest.raises(TypeError, match="multiprocessors"):
        Target(device, "sm_90a")  # pyright: ignore[reportCallIssue]
