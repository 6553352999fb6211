"""Recorded products with quantised activations: which weights take them, with what operands."""

from typing import Any

import pytest
import torch

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Launch
from dsv4.launch.recording import Recording
from dsv4.ops.linear import prefill_scaled, prefill_w16
from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.linear.prefill_scaled import ScaledCall
from dsv4.ops.linear.row_list import PackedRows, pack_rows
from dsv4.ops.native_packing import native_packing
from dsv4.weights.packed import pack_weight
from dsv4.weights.packed_native import pack_with_native
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import (
    BF16,
    FP8,
    MXFP4,
    NVFP4,
    TARGETS,
    activations,
    empty,
    names,
    stored,
)
from tests.ops.linear.products import record_everything

BLACKWELL = TARGETS[1]


class Gemms:
    """Stands for the compiled kernels: notes what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[ScaledConfig, tuple[Any, ...]]] = []

    def load(self, config: ScaledConfig, architecture: str) -> Any:
        assert architecture == "sm_100a"
        return lambda *operands: self.calls.append((config, operands))


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """As if the packages were installed, but no kernel for 16-bit activations."""
    found = Gemms()
    monkeypatch.setattr(prefill_w16, "INSTALLED", False)
    monkeypatch.setattr(prefill_scaled, "INSTALLED", True)
    monkeypatch.setattr(prefill_scaled, "load_gemm", found.load)
    return found


def call_of(recording: Recording) -> Call:
    item = recording.items[-1]
    assert isinstance(item, Call)
    return item


def call(recording: Recording) -> Call:
    item = call_of(recording)
    assert isinstance(item.function, ScaledCall)
    return item


@pytest.mark.parametrize(
    ("format", "nvfp4", "code_width", "kernel"),
    [
        (FP8, False, 1024, "quantize_rows"),
        (MXFP4, True, 1024, "quantize_rows"),
        (NVFP4, False, 1024, "quantize_rows"),
        (NVFP4, True, 512, "quantize_rows"),
    ],
)
def test_rows_are_quantised_and_multiplied(
    gemms: Gemms, format: QuantFormat, nvfp4: bool, code_width: int, kernel: str
) -> None:
    weight = pack_with_native(stored(format, 512, 1024), nvfp4)
    recording = Recording(BLACKWELL, 500)
    y = prefill_scaled.linear(recording, activations(recording, 1024), weight, torch.float32)
    assert (tuple(y.shape), y.dtype) == ((500, 512), torch.float32)
    assert names(recording) == [kernel, "call"]
    made = call(recording)
    for tokens in (9, 128, 129, 500):
        made.function(tokens, *made.tensors)
        config, operands = gemms.calls.pop()
        assert config.pair == (tokens > 128)
        assert config.format is weight.native.format if weight.native else None
        rows, scales, totals, data, block_scale, global_scale = operands[:6]
        assert tuple(rows.shape) == (tokens, code_width)
        assert scales.shape == (512 * 1024 // (32 if code_width == 1024 else 16),)
        assert (totals is None) == (code_width == 1024)
        assert weight.native is not None
        assert storage_key(data) == storage_key(weight.native.data)
        assert tuple(data.shape) == (1, *weight.native.data.shape)
        assert tuple(block_scale.shape) == (1, *weight.native.block_scale.shape)
        assert tuple(global_scale.shape) == (1,)
        assert operands[6:10] == (None, None, None, None)
        assert storage_key(operands[10]) == storage_key(y)
        assert operands[11:] == (None, None, 0.0, 0.0)


def test_groups_are_one_row(gemms: Gemms) -> None:
    weight = pack_with_native(stored(FP8, 4 * 128, 256), nvfp4=False)
    recording = Recording(BLACKWELL, 100)
    y = prefill_scaled.grouped_linear(recording, activations(recording, 4, 256), weight)
    assert y.shape == (100, 4, 128)
    made = call(recording)
    made.function(100, *made.tensors)
    _, operands = gemms.calls.pop()
    assert tuple(operands[0].shape) == (100, 1024)
    assert tuple(operands[3].shape) == (1, 512, 256)
    # Groups with gaps between them are no row.
    gaps = activations(recording, 4, 512)[:, :, :256]
    prefill_scaled.grouped_linear(recording, gaps, weight)
    assert names(recording)[2:] == ["prefill_linear"]


def test_one_quantisation_serves_a_row_list(gemms: Gemms) -> None:
    formats = (FP8, NVFP4, MXFP4)
    rows = native_packing("nvfp4").pack_rows(
        [stored(format, 256, 1024) for format in formats], [None, None, torch.float32]
    )
    recording = Recording(BLACKWELL, 500)
    norm = empty(torch.float32, 1024)
    products = prefill_scaled.linear_rows(recording, activations(recording, 1024), rows, norm, 1e-6)
    assert [(*y.shape, y.dtype) for y in products] == [
        (500, 256, dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    ]
    # The norm is part of the quantisation: once in FP8, once in NVFP4.
    assert names(recording) == ["quantize_rows", "call", "quantize_rows", "call", "call"]
    for index in (0, 2):
        launch = recording.items[index]
        assert isinstance(launch, Launch)
        assert launch.arguments["norm_weight"] is norm


def test_a_row_list_with_other_matrices_is_normed_once(gemms: Gemms) -> None:
    rows = native_packing("fp8").pack_rows(
        [stored(FP8, 256, 1024), stored(BF16, 64, 1024)], [None, torch.float32]
    )
    recording = Recording(BLACKWELL, 500)
    norm = empty(torch.float32, 1024)
    prefill_scaled.linear_rows(recording, activations(recording, 1024), rows, norm, 1e-6)
    assert names(recording) == ["rms_norm", "quantize_rows", "call", "prefill_linear"]
    launch = recording.items[1]
    assert isinstance(launch, Launch)
    assert launch.arguments["norm_weight"] is None


def test_everything_else_is_left_to_the_other_form(
    gemms: Gemms, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pack_with_native(stored(FP8, 256, 1024), nvfp4=False)
    odd = pack_with_native(stored(FP8, 100, 1024), nvfp4=False)
    cases = [
        (BLACKWELL, pack_weight(stored(FP8, 256, 1024))),
        (BLACKWELL, pack_with_native(stored(BF16, 256, 1024), nvfp4=False)),
        (BLACKWELL, odd),
        (TARGETS[0], native),
    ]
    for target, weight in cases:
        recording = Recording(target, 500)
        prefill_scaled.linear(recording, activations(recording, 1024), weight)
        assert names(recording) == ["prefill_linear"]
    monkeypatch.setattr(prefill_scaled, "INSTALLED", False)
    recording = Recording(BLACKWELL, 500)
    prefill_scaled.linear(recording, activations(recording, 1024), native)
    assert names(recording) == ["prefill_linear"]


def test_sixteen_bit_activations_are_the_other_form(
    gemms: Gemms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_w16, "INSTALLED", True)
    monkeypatch.setattr(prefill_w16, "load_gemm", lambda *_: None)
    recording = Recording(BLACKWELL, 500)
    weight = pack_with_native(stored(BF16, 256, 1024), nvfp4=False)
    prefill_scaled.linear(recording, activations(recording, 1024), weight)
    assert names(recording) == ["prefill_linear", "call"]
    assert not isinstance(call_of(recording).function, ScaledCall)


def test_everything_is_recorded(gemms: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of published and odd shapes, packed with their native copies."""
    import tests.ops.linear.products as products

    def packed_list(*arguments: Any) -> PackedRows:
        matrices, columns = arguments
        weights = [stored(format, rows, columns) for rows, format in matrices]
        dtypes = [torch.float32 if format is BF16 else None for _, format in matrices]
        return pack_rows(weights, dtypes, pack)

    def pack(weight: Any) -> Any:
        return pack_with_native(weight, nvfp4=True)

    monkeypatch.setattr(products, "pack_weight", pack)
    monkeypatch.setattr(products, "packed_list", packed_list)
    recording = Recording(BLACKWELL, 500)
    record_everything(prefill_scaled, recording)
    for item in recording.items:
        if isinstance(item, Call) and isinstance(item.function, ScaledCall):
            item.function(500, *item.tensors)
    # FP8, NVFP4 and MXFP4 matrices of published and odd shapes, with and without a norm.
    assert len(gemms.calls) > 20
