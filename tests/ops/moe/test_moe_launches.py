"""What the experts' launchers record, for the published shapes and unusual ones; nothing runs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.buffers import byte_offset
from dsv4.launch.items import Launch
from dsv4.launch.kernel import ceil_div
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.launch.workspace import lay_out
from dsv4.ops.linear.prefill import FEW, NARROW, SOME, WIDE
from dsv4.ops.moe import decode, prefill
from dsv4.ops.moe.grouped import Cut
from dsv4.ops.moe.operands import Layer
from dsv4.ops.router import Router
from dsv4.step.kernel_names import _lengths
from dsv4.weights.packed import PackedWeight
from tests.ops.moe.meta_layer import (
    BF16,
    FLASH,
    GEOMETRIES,
    NVFP4,
    PRO,
    Geometry,
    launches,
    names,
    step,
)
from tests.ops.recorded import HOPPER, TARGETS, meta

LIMIT = 10.0
ROUTE = ["prefill_linear", "router_select"]
PART = [
    "moe_sort",
    "prefill_gate_up",
    "prefill_down",
    "prefill_gate_up",
    "prefill_linear",
    "moe_combine",
]
TOKENS = (9, 10, 100, 129, 511, 512)


def recorded_decode(geometry: Geometry, target: Target, tokens: int) -> Recording:
    recording = Recording(target, tokens)
    inputs = step(recording, geometry)
    y_TE, _, _ = decode.moe(recording, *inputs, geometry.router(), *geometry.weights(), LIMIT)
    assert (tuple(y_TE.shape), y_TE.dtype) == ((tokens, geometry.width), torch.bfloat16)
    return recording


def recorded_prefill(geometry: Geometry, target: Target, tokens: int) -> Recording:
    recording = Recording(target, tokens)
    inputs = step(recording, geometry)
    y_TE, _, _ = prefill.moe(recording, *inputs, geometry.router(), *geometry.weights(), LIMIT)
    assert (tuple(y_TE.shape), y_TE.dtype) == ((tokens, geometry.width), torch.bfloat16)
    return recording


def bytes_of(launch: Launch, argument: str) -> int:
    tensor = launch.arguments[argument]
    assert isinstance(tensor, Tensor)
    return tensor.nbytes


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


@pytest.mark.parametrize("finely", [False, True])
@pytest.mark.parametrize(("per_token", "experts"), [(6, 256), (6, 384), (8, 8), (1, 3)])
def test_the_most_tiles_are_those_of_no_number_of_tokens_alone(
    per_token: int, experts: int, finely: bool
) -> None:
    cut = Cut(per_token, experts, finely)
    most = 0
    for tokens in range(1, 4097):
        most = max(most, cut.tiling(tokens).most)
        assert cut.most_tiles(tokens) == most


def test_every_tile_is_that_of_a_length_whose_kernels_are_compiled_ahead() -> None:
    for experts in range(16, 513, 16):
        for per_token in (1, 2, 4, 6, 8):
            cut = Cut(per_token, experts, finely=True)
            known = {cut.tiling(tokens).tile for tokens in [*_lengths(4096), 4096]}
            assert {cut.tiling(tokens).tile for tokens in range(9, 4097)} == known, cut


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    """Flash: 16 pairs are 682 tokens, 48 are 2,048, 64 are 2,730. Others than ours are whole."""
    found = [Cut(6, 256, finely=True).tiling(n).tile for n in (9, 682, 683, 2048, 2049, 2730, 2731)]
    assert found == [FEW, FEW, SOME, SOME, NARROW, NARROW, WIDE]
    assert Cut(6, 256).tiling(9).tile == NARROW


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_scratch_memory_of_a_chunk_holds_every_pair_and_the_most_tiles(geometry: Geometry) -> None:
    """Most tiles of 128 pairs result when every expert has one pair more than whole tiles."""
    for tokens in (9, 130, 2048):
        _, _, sort, gate_up, down, shared, product, _ = launches(
            recorded_prefill(geometry, HOPPER, tokens)
        )
        pairs = tokens * geometry.per_token
        used = min(geometry.experts, pairs)
        whole = (pairs - used) // 128
        most = used + whole
        assert bytes_of(sort, "slots") >= 4 * pairs
        assert bytes_of(sort, "tiles") >= 16 * most
        assert sort.shape.shared_bytes >= 4 * (34 * (geometry.experts + 1) + pairs)
        assert bytes_of(gate_up, "h") >= 2 * pairs * geometry.inner
        assert bytes_of(down, "y") >= 4 * pairs * geometry.width
        assert bytes_of(shared, "h") >= 2 * tokens * geometry.inner
        assert bytes_of(product, "y") >= 4 * tokens * geometry.width


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


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_prefill_recording_serves_every_shorter_chunk(geometry: Geometry, target: Target) -> None:
    exact = {tokens: recorded_prefill(geometry, target, tokens) for tokens in TOKENS}
    for most in (512, 2048):
        recording = recorded_prefill(geometry, target, most)
        assert names(recording) == ROUTE + PART
        for tokens, expected in exact.items():
            for launch, single in zip(launches(recording), launches(expected), strict=True):
                assert launch.shape_of is not None
                assert launch.shape_of(tokens) == single.shape


def test_parts_of_a_long_chunk_share_their_memory() -> None:
    geometry = PRO
    most = 4352
    layer = Layer(*geometry.weights(), LIMIT)
    assert prefill.tokens_of_a_part(layer, geometry.per_token) == most
    recording = recorded_prefill(geometry, HOPPER, 8192)
    assert names(recording) == ROUTE + PART + PART
    assert lay_out(recording).nbytes < (1 << 30) + (256 << 20)
    first = launches(recording)[2:8]
    second = launches(recording)[8:]
    for tokens in (9, 100, 3840):
        alone = launches(recorded_prefill(geometry, HOPPER, tokens))[2:]
        for launch, single in zip(first, alone, strict=True):
            assert launch.shape_of is not None
            assert launch.shape_of(tokens) == single.shape
        for launch, single in zip(second, alone, strict=True):
            assert launch.shape_of is not None
            assert launch.shape_of(most + tokens) == single.shape
            assert launch.shape_of(tokens) is None
            assert launch.shape_of(most) is None
    whole = launches(recorded_prefill(geometry, HOPPER, most))[2:]
    for launch, full in zip(first, whole, strict=True):
        assert launch.shape_of is not None
        assert launch.shape_of(8192) == launch.shape_of(most) == full.shape


def test_rows_between_16_byte_borders_are_copied_first() -> None:
    """As no published width needs it."""
    geometry = Geometry(36, 20, 5, 3, (BF16, BF16))
    recording = recorded_prefill(geometry, HOPPER, 50)
    assert len(recording.items) == len(ROUTE + PART) + 1


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
