"""What the experts' launchers record, for the published shapes and unusual ones; nothing runs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import byte_offset
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe import decode
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight
from tests.ops.moe.meta_layer import (
    BF16,
    FLASH,
    GEOMETRIES,
    LIMIT,
    NVFP4,
    PRO,
    Geometry,
    bytes_of,
    launches,
    names,
    recorded,
    step,
)
from tests.ops.recorded import HOPPER, TARGETS, meta

recorded_decode = partial(recorded, decode)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_decode_step_is_one_launch(geometry: Geometry, target: Target) -> None:
    for tokens in range(1, 9):
        recording = recorded_decode(geometry, target, tokens)
        (launch,) = launches(recording)
        assert names(recording) == ["moe_decode"]
        assert launch.shape_of is None
        assert launch.shape.grid == (target.multiprocessors, 1, 1)
        assert 114 << 10 <= launch.shape.shared_bytes <= 219 << 10
        defines = dict(launch.shape.kernel.defines)
        assert defines["TOKENS"] == tokens
        assert launch.shape.threads == 32 * defines["WARPS"]
        read_by_hash = [launch.arguments[name] is not None for name in ("table_VP", "tokens_T")]
        assert read_by_hash == [geometry.hashed] * 2
        assert (launch.arguments["bias_X"] is None) == geometry.hashed


def test_published_decode_shapes() -> None:
    """Warps, stages and shared memory as they were measured (docs/kernels/moe.md)."""
    found = {}
    for name, geometry in (("flash", FLASH), ("pro", PRO)):
        for tokens in (1, 4, 8):
            (launch,) = launches(recorded_decode(geometry, HOPPER, tokens))
            defines = dict(launch.shape.kernel.defines)
            ring = (defines["WARPS"], defines["STAGES"])
            found[name, tokens] = (*ring, launch.shape.shared_bytes, defines["VECTORS"])
    assert found == {
        ("flash", 1): (12, 2, 129_024, 2),
        ("flash", 4): (12, 2, 184_320, 2),
        ("flash", 8): (12, 2, 208_896, 2),
        ("pro", 1): (12, 2, 131_072, 3),
        ("pro", 4): (12, 2, 192_512, 3),
        ("pro", 8): (12, 1, 194_560, 3),
    }


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_scratch_memory_of_a_decode_step_holds_what_moe_decode_writes(geometry: Geometry) -> None:
    """Twice a hidden row for every routed expert and the shared one; words of 64 bits of 32 output
    rows that a block hands to the next one.
    """
    for tokens in (1, 3, 8):
        for launch in launches(recorded_decode(geometry, HOPPER, tokens)):
            count = launch.arguments["T"]
            assert isinstance(count, int)
            inner = ceil_div(geometry.inner, 64) * 64
            half_bytes = launch.arguments["half_bytes"]
            assert isinstance(half_bytes, int)
            assert half_bytes >= count * (geometry.per_token + 1) * inner * 2
            assert half_bytes % 128 == 0
            assert bytes_of(launch, "h") == 2 * half_bytes
            assert bytes_of(launch, "sums") >= HOPPER.multiprocessors * count * 32 * 8
            assert bytes_of(launch, "counters") >= (2 + 2 * count * geometry.experts) * 4


def test_tokens_that_do_not_fit_are_recorded_in_halves() -> None:
    """Each half writes its rows of the same results."""
    geometry = Geometry(7168, 256, 4, 4, (NVFP4, BF16))
    recording = Recording(HOPPER, 8)
    inputs = step(recording, geometry)
    arguments = (geometry.router(), *geometry.weights(), LIMIT)
    results = decode.moe(recording, *inputs, *arguments)
    first, second = launches(recording)
    assert (first.arguments["T"], second.arguments["T"]) == (4, 4)
    assert first.shape == second.shape
    for name, result in zip(("y_TE", "ids_TP", "weights_TP"), results, strict=True):
        for launch, offset in ((first, 0), (second, result.nbytes // 2)):
            half = launch.arguments[name]
            assert isinstance(half, Tensor)
            assert half.untyped_storage()._cdata == result.untyped_storage()._cdata
            assert byte_offset(half) == offset


def test_all_launches_of_a_recording_share_what_they_number_and_hand_over() -> None:
    """The number of a launch says which half of h is its own, so h is of one size for all layers
    and all token counts.
    """
    recording = Recording(HOPPER, 5)
    x_TE, tokens_T = step(recording, FLASH)
    for geometry in (FLASH, replace(FLASH, hashed=True, formats=(NVFP4, NVFP4))):
        for part in (slice(2), slice(5)):
            inputs = (x_TE[part], tokens_T[part])
            decode.moe(recording, *inputs, geometry.router(), *geometry.weights(), LIMIT)
    first, *others = launches(recording)
    assert len(others) == 3
    for other in others:
        for name in ("counters", "sums", "h"):
            assert first.arguments[name] is other.arguments[name]
    half = 5 * 7 * 2048 * 2
    assert {launch.arguments["half_bytes"] for launch in (first, *others)} == {half}
    sizes = [tensor.nbytes for tensor in recording.zeroed_tensors]
    sums = HOPPER.multiprocessors * 8 * 32 * 8
    assert sorted(sizes) == sorted([2 * half, 4 * decode.COUNTERS, sums])


def test_what_a_kernel_cannot_read_is_refused() -> None:
    recording = Recording(HOPPER, 2)
    x_TE, tokens_T = step(recording, FLASH)
    weights = FLASH.weights()
    router = FLASH.router()

    def moe(x_TE: Tensor = x_TE, router: Router[PackedWeight] = router) -> None:
        decode.moe(recording, x_TE, tokens_T, router, *weights, LIMIT)

    with pytest.raises(ValueError, match="x_TE: found torch.float32"):
        moe(x_TE=meta(2, 4096, dtype=torch.float32))
    with pytest.raises(ValueError, match="x_TE: found strides"):
        moe(x_TE=meta(2, 8192, dtype=torch.bfloat16)[:, :4096])
    with pytest.raises(ValueError, match="x_TE: found a start between"):
        moe(x_TE=meta(2 * 4096 + 1, dtype=torch.bfloat16)[1:].view(2, 4096))
    with pytest.raises(ValueError, match="x_TE: found 9 tokens, expected 1 to 8"):
        moe(x_TE=meta(9, 4096, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="selection: found strides"):
        moe(router=replace(router, selection=meta(256, 2, dtype=torch.float32)[:, 0]))
    with pytest.raises(ValueError, match="experts: found 256, expected 7, the rows of the gate"):
        moe(router=replace(FLASH, experts=7).router())
    wide = Geometry(65536, 64, 8)
    with pytest.raises(ValueError, match="x_TE: found width 65536, more than"):
        recorded_decode(replace(wide, formats=(NVFP4, BF16)), HOPPER, 1)
    assert recording.items == []
