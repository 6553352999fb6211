"""What the experts' launcher with quantised activations records; nothing runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.ops.linear import prefill_scaled as linear_scaled
from dsv4.ops.linear import prefill_w16
from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.moe import prefill_scaled
from dsv4.ops.moe.native import NativeExperts, pack_native_experts
from dsv4.ops.quantize_activations import hidden_global_scale
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4, stored
from tests.ops.linear.meta import names as items_of
from tests.ops.moe.meta_layer import FLASH, Geometry, step
from tests.ops.recorded import BLACKWELL, HOPPER

LIMIT = 10.0
ROUTE = ["prefill_linear", "router_select"]
SORTED = ["moe_sort", "quantize_sorted_rows", "call", "call"]
SHARED = ["quantize_rows", "call", "call"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ScaledConfig, tuple[Any, ...]]]:
    """What the kernels were called with, as if they were compiled and none for 16 bit were."""
    made: list[tuple[ScaledConfig, tuple[Any, ...]]] = []

    def load(config: ScaledConfig, architecture: str) -> Any:
        assert architecture == "sm_100a"
        return lambda *operands: made.append((config, operands))

    monkeypatch.setattr(prefill_w16, "INSTALLED", False)
    monkeypatch.setattr(linear_scaled, "INSTALLED", True)
    monkeypatch.setattr(linear_scaled, "load_gemm", load)
    return made


def experts(format: QuantFormat, geometry: Geometry, nvfp4: bool, *stack: int) -> NativeExperts:
    inner, width = geometry.inner, geometry.width
    up, down = ((*stack, *sizes) for sizes in ((inner, width), (width, inner)))
    given = stored(format, *up), stored(format, *down), stored(format, *up)
    return pack_native_experts(*given, nvfp4=nvfp4)


def recorded(
    formats: tuple[QuantFormat, QuantFormat],
    geometry: Geometry,
    tokens: int,
    nvfp4: bool = False,
    target: Any = BLACKWELL,
) -> Recording:
    routed, shared = formats
    recording = Recording(target, tokens)
    layer = (
        experts(routed, geometry, nvfp4, geometry.experts),
        experts(shared, geometry, nvfp4),
    )
    x_TE, tokens_T = step(recording, geometry)
    y_TE, _, _ = prefill_scaled.moe(recording, x_TE, tokens_T, geometry.router(), *layer, LIMIT)
    assert (tuple(y_TE.shape), y_TE.dtype) == ((tokens, geometry.width), torch.bfloat16)
    return recording


@pytest.mark.slow
def test_hidden_rows_go_from_product_to_product(
    calls: list[tuple[ScaledConfig, tuple[Any, ...]]],
) -> None:
    recording = recorded((NVFP4, FP8), FLASH, 500, nvfp4=True)
    assert items_of(recording) == [*ROUTE, *SORTED, *SHARED, "moe_combine"]
    for item in recording.items:
        if isinstance(item, Call):
            item.function(500, *item.tensors)
    (gated, up), (downward, down), (shared_gated, shared_up), (shared_downward, _) = calls
    assert (gated.format, gated.gated, gated.sorted, gated.pair) == (NVFP4, True, True, False)
    assert (downward.out_dtype, downward.sorted) == (torch.float32, True)
    assert (shared_gated.format, shared_gated.gated, shared_gated.sorted) == (FP8, True, False)
    assert (shared_downward.out_dtype, shared_downward.sorted) == (torch.float32, False)
    most = 500 * 6 // 128 + 256
    assert tuple(up[0].shape) == (most * 128, 4096 // 2)
    assert tuple(up[3].shape) == (256, 2 * 2048, 4096 // 2)
    assert tuple(up[5].shape) == (2 * 256,)
    assert up[9].shape == (500 * 6,)
    # Hidden codes, their scales and global scales are what the next product reads.
    for written, read in zip(up[10:13], down[0:3], strict=True):
        assert same_memory(written, read)
        assert written.shape == read.shape
    assert up[13:] == (LIMIT, hidden_global_scale(LIMIT, 1.5))
    assert [tuple(tensor.shape) for tensor in up[6:9]] == [(most, 4), (1,), (3000,)]
    assert all(map(same_memory, up[6:9], down[6:9]))
    assert down[9] is None
    assert (tuple(down[10].shape), down[10].dtype) == ((3000, 4096), torch.float32)
    assert tuple(shared_up[0].shape) == (500, 4096)
    assert shared_up[6:10] == (None, None, None, None)
    assert shared_up[13:] == (LIMIT, hidden_global_scale(LIMIT, 1.0))


def test_a_recording_serves_shorter_chunks(
    calls: list[tuple[ScaledConfig, tuple[Any, ...]]],
) -> None:
    recording = recorded((MXFP4, MXFP4), Geometry(256, 128, 8), 300)
    found = [item for item in recording.items if isinstance(item, Call)]
    for tokens in (9, 128, 129, 300):
        calls.clear()
        for item in found:
            item.function(tokens, *item.tensors)
        (_, routed), _, (shared, operands), _ = calls
        assert routed[0].shape[0] == (300 * 6 // 128 + 8) * 128
        assert (shared.pair, operands[0].shape[0]) == (tokens > 128, tokens)


@pytest.mark.parametrize(
    ("formats", "target", "tokens", "parts"),
    [
        ((BF16, FP8), BLACKWELL, 300, [*SHARED]),
        ((FP8, BF16), BLACKWELL, 300, [*SORTED]),
        ((FP8, FP8), HOPPER, 128, []),
    ],
)
def test_experts_that_have_no_kernel_are_left_to_the_other_form(
    calls: list[tuple[ScaledConfig, tuple[Any, ...]]],
    formats: tuple[QuantFormat, QuantFormat],
    target: Any,
    tokens: int,
    parts: list[str],
) -> None:
    found = items_of(recorded(formats, Geometry(256, 128, 8), tokens, target=target))
    boxes = ["moe_sort", "gather_rows", "long_gate_up", "long_down"]
    copied = boxes if target is HOPPER else ["moe_sort", "prefill_gate_up", "prefill_down"]
    routed = SORTED if parts == SORTED else copied
    shared = SHARED if parts == SHARED else ["prefill_gate_up", "prefill_linear"]
    assert found == [*ROUTE, *routed, *shared, "moe_combine"]
    assert calls == []


def same_memory(a: Tensor, b: Tensor) -> bool:
    return storage_key(a) == storage_key(b)
