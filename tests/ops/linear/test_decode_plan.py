"""The split of decode products over blocks: everything is covered once, shared memory fits, real
shapes use the GPU.
"""

from dataclasses import replace

import pytest

from dsv4.integers import ceil_div, round_up
from dsv4.launch.constants import SLOT_LINE_BYTES, STAGE_SCALE_BYTES
from dsv4.ops.linear.decode_plan import (
    MAX_SLICES,
    WARPS,
    ProductShape,
    has_room_for_columns,
    plan_linear,
)
from dsv4.weights.quant import QuantFormat
from tests.ops.recorded import HOPPER

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
SHARED_PER_BLOCK = 227 << 10
# That a block asks for: two never share an SM.
LEAST_SHARED = 116 << 10
# (formats, tiles, K, groups): Pro and Flash input rows (CSA, HCA), query rows, o_a, o_b, down,
# head; tiny ones.
SHAPES = [
    ((FP8, BF16), (128, 164), 7168, 1),
    ((NVFP4, BF16), (128, 64), 7168, 1),
    ((FP8, BF16), (96, 164), 4096, 1),
    ((FP8,), (4608,), 1536, 1),
    ((NVFP4,), (2560,), 1024, 1),
    ((NVFP4,), (64,), 4096, 16),
    ((FP8,), (64,), 4096, 8),
    ((FP8,), (448,), 16384, 1),
    ((NVFP4,), (256,), 8192, 1),
    ((BF16,), (8080,), 7168, 1),
    ((MXFP4,), (1,), 32, 1),
    ((FP8, BF16), (4, 4), 64, 1),
    ((BF16,), (2,), 64, 2),
    ((BF16,), (20000,), 16384, 1),
    ((FP8,), (448,), 12288, 1),
]


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize(("formats", "tiles", "columns", "groups"), SHAPES)
def test_plan_fits_the_machine(
    formats: tuple[QuantFormat, ...],
    tiles: tuple[int, ...],
    columns: int,
    groups: int,
    tokens: int,
) -> None:
    plan = plan_linear(ProductShape(formats, tiles, columns, groups), tokens, HOPPER)
    assert plan.tokens == tokens
    assert plan.shared_bytes <= SHARED_PER_BLOCK - 4096
    assert all(0 < clusters <= count for clusters, count in zip(plan.clusters, tiles, strict=True))
    assert plan.slice_columns % 256 == 0
    assert ceil_div(columns, plan.slice_columns) <= MAX_SLICES
    assert plan.activation_bytes == 2 * tokens * plan.slice_columns
    stage = {NVFP4: 256, MXFP4: 256, FP8: 128, BF16: 64}
    assert plan.ragged == any(ceil_div(columns, 64) * 64 % stage[format] for format in formats)
    # Every block of a cluster has a slice: one without would not wait for the kernel before.
    assert plan.cluster == 1 or ceil_div(columns, plan.slice_columns) == plan.cluster
    if tiles != (20000,):
        assert plan.blocks(groups) <= 132
    if columns <= 2048 and tiles[0] > 1000:
        assert plan.cluster == 1


def test_blocks_share_the_work_evenly() -> None:
    def busiest(formats: tuple[QuantFormat, ...], tiles: tuple[int, ...]) -> list[int]:
        plan = plan_linear(ProductShape(formats, tiles, 7168), 1, HOPPER)
        return [
            ceil_div(count, clusters) for count, clusters in zip(tiles, plan.clusters, strict=True)
        ]

    assert busiest((BF16,), (8080,)) == [62]
    # A BF16 tile has twice the bytes of an FP8 tile.
    assert busiest((FP8, BF16), (128, 164)) == [3, 2]
    assert busiest((FP8, BF16), (128, 64)) == [2, 1]


@pytest.mark.parametrize(("formats", "tiles", "columns", "groups"), SHAPES)
def test_shared_memory_holds_what_the_kernel_puts_there_and_no_more(
    formats: tuple[QuantFormat, ...], tiles: tuple[int, ...], columns: int, groups: int
) -> None:
    """As decode_linear.cu counts it: rings, activations, partial sums, and in a cluster the sums
    that the other blocks send.
    """
    for tokens in range(1, 9):
        plan = plan_linear(ProductShape(formats, tiles, columns, groups), tokens, HOPPER)
        most_tiles = max(
            ceil_div(count, clusters) for count, clusters in zip(tiles, plan.clusters, strict=True)
        )
        tile_bytes = 16 * tokens * 4
        assert plan.turns == ceil_div(columns, plan.slice_columns) // plan.cluster
        assert plan.partial_bytes == plan.turns * (most_tiles + WARPS - 1) * tile_bytes
        scales = max(STAGE_SCALE_BYTES[format] for format in formats)
        slot = round_up(2048 + scales, SLOT_LINE_BYTES)
        used = WARPS * plan.depth * slot + plan.activation_bytes + plan.partial_bytes
        if plan.cluster > 1:
            used += ceil_div(most_tiles, plan.cluster) * plan.cluster * tile_bytes
        assert plan.shared_bytes == max(used, LEAST_SHARED)


@pytest.mark.parametrize(("formats", "tiles", "columns", "groups"), SHAPES)
def test_k_is_shared_as_the_next_power_of_two_of_tokens_needs_it(
    formats: tuple[QuantFormat, ...], tiles: tuple[int, ...], columns: int, groups: int
) -> None:
    """Sums of a token have one order then. Rings may be longer where fewer tokens leave room."""
    shape = ProductShape(formats, tiles, columns, groups)
    plans = [plan_linear(shape, tokens, HOPPER) for tokens in range(1, 9)]
    sharing = [
        (plan.cluster, plan.clusters, plan.slice_columns, plan.turns, plan.ragged) for plan in plans
    ]
    assert sharing[2] == sharing[3]
    assert set(sharing[4:]) == {sharing[7]}
    assert all(plan.depth >= plans[7].depth for plan in plans[4:])


@pytest.mark.parametrize(("format", "tiles", "later"), [(FP8, 2048, 512), (NVFP4, 512, 512)])
def test_later_tiles_are_dealt_to_all_blocks(format: QuantFormat, tiles: int, later: int) -> None:
    """Query rows of Flash, and of Pro as a rank of 8: with them the same blocks have the same of
    the other tiles, and room for more partial sums.
    """
    alone = ProductShape((format,), (tiles,), 1536)
    for tokens in range(1, 9):
        plan = plan_linear(alone._replace(later=later), tokens, HOPPER)
        without = plan_linear(alone, tokens, HOPPER)
        assert plan.clusters == without.clusters == (132,)
        assert dict(plan.defines) == {**dict(without.defines), "LATER": 1}
        more = (ceil_div(later, 132) + WARPS - 1) * 16 * tokens * 4
        assert plan.partial_bytes == without.partial_bytes + more
        assert plan.shared_bytes == without.shared_bytes + more


def test_later_tiles_need_all_of_k_in_a_block() -> None:
    shape = ProductShape((FP8,), (448,), 16384, later=64)
    assert [has_room_for_columns(shape, tokens, HOPPER) for tokens in (1, 4, 5, 8)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_cluster_shares_activations_that_one_block_cannot_hold() -> None:
    assert plan_linear(ProductShape((FP8,), (448,), 16384), 4, HOPPER).cluster == 1
    assert plan_linear(ProductShape((FP8,), (448,), 16384), 8, HOPPER).cluster > 1
    assert plan_linear(ProductShape((FP8,), (64,), 4096, 16), 8, HOPPER).cluster == 1


def test_clusters_are_as_many_as_run_at_once() -> None:
    shape = ProductShape((BF16,), (448,), 16384)
    for target, clusters in ((HOPPER, 66), (replace(HOPPER, clusters=((2, 60),)), 60)):
        plan = plan_linear(shape, 8, target)
        assert (plan.cluster, plan.clusters) == (2, (clusters,))


def test_one_token_leaves_room_for_other_kernels_only() -> None:
    """Two such blocks never share an SM (the scheduler would leave others empty), small ones of
    other kernels can.
    """
    for formats, tiles, columns, groups in SHAPES[:10]:
        plan = plan_linear(ProductShape(formats, tiles, columns, groups), 1, HOPPER)
        assert 114 << 10 <= plan.shared_bytes <= 170 << 10


def test_ring_is_shallower_where_that_saves_a_cluster() -> None:
    shape = ProductShape((QuantFormat.FP8_BLOCK128,), (448,), 16384)
    assert [
        (plan_linear(shape, tokens, HOPPER).depth, plan_linear(shape, tokens, HOPPER).cluster)
        for tokens in (1, 4)
    ] == [
        (4, 1),
        (2, 1),
    ]


def test_threads_hold_the_activations_that_fit_into_their_registers() -> None:
    shape = ProductShape((QuantFormat.FP8_BLOCK128,), (448,), 8192)
    held = [dict(plan_linear(shape, tokens, HOPPER).defines)["PIECES"] for tokens in (1, 2, 4, 8)]
    assert held == [2, 2, 2, 1]
