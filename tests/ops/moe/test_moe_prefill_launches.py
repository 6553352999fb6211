"""What the experts of a prompt record, for the published shapes and unusual ones; nothing runs."""

import itertools
from functools import partial

import pytest

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.launch.workspace import lay_out
from dsv4.ops.linear.prefill import FEW, LARGE, NARROW, SOME, WIDE
from dsv4.ops.moe import prefill
from dsv4.ops.moe.operands import Layer
from dsv4.ops.moe.sorted_pairs import Cut
from dsv4.step.kernel_names import _lengths
from tests.ops.moe.meta_layer import (
    BF16,
    FLASH,
    GEOMETRIES,
    LIMIT,
    PRO,
    Geometry,
    bytes_of,
    launches,
    names,
    recorded,
)
from tests.ops.recorded import HOPPER, TARGETS, shape_at

ROUTE = ["prefill_linear", "router_select"]
PART = [
    "moe_sort",
    "prefill_gate_up",
    "prefill_down",
    "prefill_gate_up",
    "prefill_linear",
    "moe_combine",
]
# Of Hopper.
BOXES_PART = ["moe_sort", "gather_rows", "long_gate_up", "long_down", *PART[3:]]
# Where every expert has more than 48 pairs: the forms of short steps, and those of long ones.
LONG_ROUTE = ["prefill_linear", "long_linear", "router_select"]
LONG_PART = [
    "moe_sort",
    "gather_rows",
    "long_gate_up",
    "long_gate_up",
    "long_down",
    "long_down",
    "prefill_gate_up",
    "long_gate_up",
    "prefill_linear",
    "long_linear",
    "moe_combine",
]
TOKENS = (9, 10, 100, 129, 511, 512)


recorded_prefill = partial(recorded, prefill)


@pytest.mark.parametrize("finely", [False, True])
@pytest.mark.parametrize("coarsely", [False, True])
@pytest.mark.parametrize(("per_token", "experts"), [(6, 256), (6, 384), (8, 8), (1, 3)])
def test_the_most_tiles_are_those_of_no_number_of_tokens_alone(
    per_token: int, experts: int, coarsely: bool, finely: bool
) -> None:
    cut = Cut(per_token, experts, finely, coarsely)
    most = 0
    for tokens in range(1, 4097):
        most = max(most, cut.tiling(tokens).most)
        assert cut.most_tiles(tokens) == most


def test_every_tile_is_that_of_a_length_whose_kernels_are_compiled_ahead() -> None:
    for experts in range(16, 513, 16):
        for per_token in (1, 2, 4, 6, 8):
            cut = Cut(per_token, experts, finely=True, coarsely=True)
            known = {cut.tiling(tokens).tile for tokens in [*_lengths(4096), 4096]}
            assert {cut.tiling(tokens).tile for tokens in range(9, 4097)} == known, cut


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    """Flash: 16 pairs are 682 tokens, 48 are 2,048, 64 are 2,730. Others than ours are whole."""
    found = [Cut(6, 256, finely=True).tiling(n).tile for n in (9, 682, 683, 2048, 2049, 2730, 2731)]
    assert found == [FEW, FEW, SOME, SOME, NARROW, NARROW, WIDE]
    assert Cut(6, 256).tiling(9).tile == NARROW


def test_tiles_of_many_pairs_are_large_in_long_steps() -> None:
    """Flash: 112 pairs are 4,778 tokens."""
    found = [Cut(6, 256, True, coarsely=True).tiling(n).tile for n in (9, 2049, 4778, 4779, 8192)]
    assert found == [FEW, NARROW, WIDE, LARGE, LARGE]
    assert Cut(6, 256, True).tiling(8192).tile == WIDE
    assert [Cut(1, 1, True, coarsely=True).tiling(n).tile for n in (128, 129)] == [WIDE, LARGE]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_scratch_memory_of_a_chunk_holds_every_pair_and_the_most_tiles(geometry: Geometry) -> None:
    """Most tiles result when every expert has one pair more than whole tiles."""
    for tokens, target in itertools.product((9, 130, 2048, 4096), TARGETS.values()):
        found = launches(recorded_prefill(geometry, target, tokens))
        (sort,) = (one for one in found if one.signature.kernel == "moe_sort")
        pairs = tokens * geometry.per_token
        used = min(geometry.experts, pairs)
        whole = (pairs - used) // int(sort.shape.numbers["tile"])
        most = used + whole
        assert bytes_of(sort, "slots") >= 4 * pairs
        assert bytes_of(sort, "tiles") >= 16 * most
        assert sort.shape.shared_bytes >= 4 * (34 * (geometry.experts + 1) + pairs)
        for one in found:
            kernel = one.signature.kernel
            if kernel.endswith("gate_up"):
                rows = tokens if one.arguments["slots"] is None else pairs
                assert bytes_of(one, "h") >= 2 * rows * geometry.inner
            if kernel.endswith("down"):
                assert bytes_of(one, "y") >= 4 * pairs * geometry.width
            if kernel == "gather_rows":
                assert bytes_of(one, "sorted") >= 2 * pairs * geometry.width
        *_, product, _ = found
        assert bytes_of(product, "y") >= 4 * tokens * geometry.width


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_prefill_recording_serves_every_shorter_chunk(geometry: Geometry, target: Target) -> None:
    exact = {tokens: recorded_prefill(geometry, target, tokens) for tokens in TOKENS}
    for most in (512, 2048):
        recording = recorded_prefill(geometry, target, most)
        for tokens, expected in exact.items():
            assert shapes_at(recording, tokens) == shapes_at(expected, tokens)


def shapes_at(recording: Recording, tokens: int) -> list[object]:
    """Of what is launched for so many tokens."""
    shapes = [shape_at(launch, tokens) for launch in launches(recording)]
    return [shape for shape in shapes if shape is not None]


def test_long_steps_of_hopper_have_other_forms() -> None:
    """As soon as K has few splits: of the gate, which has one block of rows, and of the shared
    expert, which has sixteen.
    """
    for target in TARGETS.values():
        hopper = target is HOPPER
        short = BOXES_PART if hopper else PART
        assert names(recorded_prefill(FLASH, target, 128)) == ROUTE + short
        expected = LONG_ROUTE + LONG_PART if hopper else ROUTE + PART
        recording = recorded_prefill(FLASH, target, 4352)
        assert names(recording) == expected
        for tokens in (9, 128, 256, 257, 2048, 2049, 4224, 4225):
            launched = [
                launch.signature.kernel
                for launch in launches(recording)
                if shape_at(launch, tokens) is not None
            ]
            gate = ["long_linear" if hopper and tokens > 4224 else "prefill_linear"]
            long_dense = hopper and tokens > 256
            dense = ["long_linear" if long_dense else "prefill_linear"]
            routed = BOXES_PART[1:4] if hopper else PART[1:3]
            shared = ["long_gate_up" if long_dense else "prefill_gate_up"]
            part = ["moe_sort", *routed, *shared, *dense, "moe_combine"]
            assert launched == [*gate, "router_select", *part], tokens


def test_large_tiles_are_hoppers() -> None:
    """Of the pairs, and of the tokens of the shared expert."""
    for target, largest in ((HOPPER, 256), (TARGETS["sm_100a"], 128)):
        recording = recorded_prefill(FLASH, target, 7000)
        for tokens, routed, shared in (
            (200, 32, 128),
            (4096, 128, largest),
            (7000, largest, largest),
        ):
            found = {
                (shape.kernel.function, launch.arguments.get("slots") is None): shape
                for launch in launches(recording)
                if isinstance(shape := shape_at(launch, tokens), Shape)
            }
            assert found["moe_sort", False].numbers["tile"] == routed
            for (kernel, dense), shape in found.items():
                if kernel.endswith(("gate_up", "down")):
                    expected = shared if dense else routed
                    assert dict(shape.kernel.defines)["TOKENS"] == expected, (kernel, tokens)


def test_parts_of_a_long_chunk_share_their_memory() -> None:
    geometry = PRO
    most = 4352
    layer = Layer(*geometry.weights(), LIMIT)
    assert prefill.tokens_of_a_part(layer, geometry.per_token) == most
    recording = recorded_prefill(geometry, HOPPER, 8192)
    assert names(recording) == LONG_ROUTE + LONG_PART + LONG_PART
    assert lay_out(recording).nbytes < (1 << 30) + (256 << 20)
    routed = len(LONG_ROUTE)
    first = launches(recording)[routed : routed + len(LONG_PART)]
    second = launches(recording)[routed + len(LONG_PART) :]
    whole = launches(recorded_prefill(geometry, HOPPER, most))[routed:]
    for tokens in (9, 100, 3840, most):
        alone = [shape_at(launch, tokens) for launch in whole]
        assert [shape_at(launch, tokens) for launch in first] == alone
    for tokens in (9, 100, 3840):
        alone = [shape_at(launch, tokens) for launch in whole]
        assert [shape_at(launch, most + tokens) for launch in second] == alone
        assert not any(shape_at(launch, tokens) for launch in second)
    assert not any(shape_at(launch, most) for launch in second)
    for launch in first:
        assert shape_at(launch, 8192) == shape_at(launch, most)


def test_rows_between_16_byte_borders_are_copied_first() -> None:
    """As no published width needs it."""
    geometry = Geometry(36, 20, 5, 3, (BF16, BF16))
    recording = recorded_prefill(geometry, HOPPER, 50)
    assert len(recording.items) == len(ROUTE + BOXES_PART) + 1
    found = [one for one in recording.items if isinstance(one, Launch)]
    (gathered,) = (one for one in found if one.signature.kernel == "gather_rows")
    assert gathered.arguments["width"] == gathered.arguments["x_stride"] == 40
