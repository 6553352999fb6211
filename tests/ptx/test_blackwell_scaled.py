"""The compiled products with quantised activations, executed: every byte that they write is that of
a reference from logical codes, under every schedule.
"""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from dsv4.weights.native import NATIVE_GROUP
from dsv4.weights.quant import QuantFormat
from dsv4.weights.scale_swizzle import unswizzle_block_scale
from tests.ops.linear.compiled import compile_once
from tests.ops.linear.scaled_configurations import MULTIPROCESSORS
from tests.ptx.run import CompiledKernel, record_launches, run_kernel
from tests.ptx.scaled_problems import (
    HIDDEN_GLOBAL,
    LIMIT,
    Operands,
    Problem,
    expected,
    operands,
    outputs,
)
from tests.ptx.schedule import SCHEDULES, Schedule, random_schedule

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
FP8, MXFP4, NVFP4 = QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4
BF16, F32 = torch.bfloat16, torch.float32


@functools.cache
def compiled(config: ScaledConfig) -> CompiledKernel:
    from dsv4.ops.linear.cutedsl.blackwell_scaled import ScaledGemm

    return compile_once(ScaledGemm, config, "sm_100a").kernel


def executed(
    problem: Problem, given: Operands, schedule: Schedule, clusters: int = 1
) -> list[np.ndarray | None]:
    """The poisoned results after the kernel; one cluster works on all tiles, one after the other,
    unless there are more.
    """
    arrays = (*given.arguments(problem), *outputs(problem))
    arguments = [None if array is None else torch.from_numpy(array).clone() for array in arrays]
    results = arguments[-3:]
    if problem.config.out_dtype == BF16:
        assert results[0] is not None
        arguments[-3] = results[0].view(BF16)
    numbers = [float(LIMIT), float(HIDDEN_GLOBAL)]
    blocks = clusters * problem.config.ctas
    run_kernel(compiled(problem.config), [*arguments, *numbers], schedule, blocks)
    return [None if tensor is None else tensor.numpy() for tensor in results]


def assert_equal(found: Sequence[np.ndarray | None], wanted: Sequence[np.ndarray | None]) -> None:
    """Every byte, but for which NaN a NaN is."""
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        different = one != other
        if one.dtype == np.float32:
            different = one.view(np.uint32) != other.view(np.uint32)
            different &= ~(np.isnan(one) & np.isnan(other))
        if one.dtype == np.uint16:
            different &= ~((one & 0x7FFF > 0x7F80) & (other & 0x7FFF > 0x7F80))
        assert not different.any(), f"{different.sum()} of {different.size} values differ"


def config(
    format: QuantFormat,
    out_dtype: torch.dtype | None,
    is_sorted: bool,
    pair: bool,
    features: int = 256,
) -> ScaledConfig:
    """One of those that are compiled for real products."""
    return ScaledConfig(format, out_dtype, is_sorted, pair, features, MULTIPROCESSORS)


def ragged(config: ScaledConfig) -> Problem:
    """Tokens, features and columns that fill no tile, two work tiles."""
    columns = {FP8: 160, MXFP4: 256, NVFP4: 288}[config.format]
    if config.sorted:
        tiles = ((2, 5), (0, config.tile_tokens - 60))
        return Problem(config, 0, 128, columns, tiles=tiles, experts=3)
    features = 256 if config.gated else 136
    return Problem(config, config.tile_tokens // 2 + 3, features, columns)


KERNELS = [
    config(format, out_dtype, is_sorted, pair, 256 if out_dtype is None else 128)
    for format in (FP8, MXFP4, NVFP4)
    for pair in (False, True)
    for out_dtype, is_sorted in ((BF16, False), (F32, True), (None, False), (None, True))
]
# Wide tiles, many clusters, blocks of a diagonal, one token, experts without and with one pair.
PROBLEMS = [
    Problem(config(FP8, BF16, False, False, 128), 130, 128, 256, groups=3, seed=1),
    Problem(config(MXFP4, BF16, False, True, 128), 270, 128, 128, groups=2, seed=2),
    Problem(config(FP8, BF16, False, False, 128), 1, 8, 32, seed=3),
    Problem(config(NVFP4, BF16, False, False, 128), 1, 8, 32, seed=4),
    Problem(config(FP8, F32, False, False, 128), 129, 72, 1056, seed=5),
    Problem(config(NVFP4, BF16, False, True, 128), 257, 264, 96, seed=6),
    Problem(config(FP8, BF16, False, False), 40, 392, 160, seed=7),
    Problem(config(MXFP4, BF16, False, True), 257, 264, 384, seed=8),
    Problem(config(NVFP4, BF16, False, True), 140, 520, 544, seed=9),
    Problem(config(MXFP4, F32, True, False), 0, 328, 128, 1, ((0, 1), (1, 128), (3, 77)), 5, 10),
    Problem(config(NVFP4, F32, True, True), 0, 200, 288, 1, ((1, 256), (0, 129), (2, 1)), 3, 11),
    Problem(config(FP8, F32, True, False, 128), 0, 64, 160, 1, ((2, 1),) * 5, 3, 12),
    Problem(config(FP8, None, True, False), 0, 128, 32, 1, ((1, 1), (0, 0), (2, 128)), 4, 13),
    Problem(config(NVFP4, None, True, True), 0, 256, 96, 1, ((0, 1), (3, 200)), 4, 14),
    Problem(config(MXFP4, None, False, True), 300, 128, 384, seed=15),
]


def name(problem: Problem) -> str:
    config = problem.config
    role = {BF16: "dense", F32: "down" if config.sorted else "f32", None: "gate_up"}
    order = "-sorted" if config.sorted else ""
    sizes = f"{problem.rows}x{problem.features}x{problem.columns}x{problem.groups}"
    width = f"{config.ctas}x{config.tile_features}"
    return f"{config.format.value}-{role[config.out_dtype]}{order}-{width}-{sizes}"


def check(problem: Problem, *schedules: Schedule, clusters: int = 1) -> None:
    given = operands(problem)
    wanted = expected(problem, given)
    for schedule in schedules:
        assert_equal(executed(problem, given, schedule, clusters), wanted)


def test_a_kernel_gives_the_bits_of_the_reference() -> None:
    """The one that is compiled fastest."""
    check(ragged(KERNELS[0]), SCHEDULES["random"])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(KERNELS)), ids=[name(ragged(one)) for one in KERNELS])
def test_no_schedule_and_no_other_row_changes_a_bit(index: int) -> None:
    """Every second schedule, the others for the kernels beside it."""
    config = KERNELS[index]
    check(ragged(config), *list(SCHEDULES.values())[index % 2 :: 2])
    assert_rows_are_independent(config)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PROBLEMS)), ids=[*map(name, PROBLEMS)])
def test_other_sizes_give_the_bits_of_the_reference(index: int) -> None:
    check(PROBLEMS[index], random_schedule(index), clusters=3)


@pytest.mark.slow
@pytest.mark.parametrize("config", [KERNELS[9], KERNELS[23]], ids=lambda one: name(ragged(one)))
def test_no_tiles_are_no_work(config: ScaledConfig) -> None:
    check(ragged(config)._replace(tiles=()), SCHEDULES["random"])


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "blocks"), [(False, 5), (True, 4)])
def test_clusters_are_no_more_than_fit_on_the_device(pair: bool, blocks: int) -> None:
    few = config(FP8, F32, False, pair, 128)._replace(multiprocessors=5)
    problem = Problem(few, 300, 512, 160)
    arguments = [*operands(problem).arguments(problem), *outputs(problem)]
    (launch,) = record_launches(compiled(few), [*arguments, float(LIMIT), float(HIDDEN_GLOBAL)])
    assert launch.grid == (blocks, 1, 1)


def assert_rows_are_independent(config: ScaledConfig) -> None:
    """Fewer rows, elsewhere, beside others: the same bits."""
    problem = ragged(config)
    given = operands(problem)
    wanted = expected(problem, given)
    slots = given.slots
    start = 3
    count = 40
    other = problem._replace(rows=count + 1)
    before = np.arange(start, start + count)
    if config.sorted:
        # The second tile becomes the first one, shorter and from its fourth row on.
        start = config.tile_tokens + 3
        count = 30
        other = problem._replace(tiles=((0, count), (1, 7)))
        pairs = given.slots[5 + 3 : 5 + 3 + count]
        before = np.arange(start, start + count) if config.gated else pairs
        slots = np.concatenate((pairs, given.slots[:7]))
        if not config.gated:
            slots = np.arange(count + 7, dtype=np.int32)
    moved = Operands(
        np.roll(given.rows, -start, 0),
        np.roll(given.row_scale, -start, 0),
        None if given.row_global is None else np.roll(given.row_global, -start),
        *given[3:6],
        slots,
        given.routing,
    )
    found = executed(other, _cut(moved, other), random_schedule(2))
    assert_equal(rows_of(other, found, np.arange(count)), rows_of(problem, wanted, before))


def _cut(given: Operands, problem: Problem) -> Operands:
    """Operands of another problem with as many rows as it has."""
    shape = operands(problem).rows.shape
    return given._replace(
        rows=given.rows[: shape[0]].copy(),
        row_scale=given.row_scale[: shape[0]].copy(),
        row_global=None if given.row_global is None else given.row_global[: shape[0]].copy(),
    )


def rows_of(
    problem: Problem, results: Sequence[np.ndarray | None], rows: np.ndarray
) -> list[np.ndarray | None]:
    """Some rows of the results, and of their scales."""
    y, scale, _ = results
    assert y is not None
    if scale is None:
        return [y[rows]]
    groups = problem.features // NATIVE_GROUP[problem.config.format]
    plain = unswizzle_block_scale(torch.from_numpy(scale), len(y), groups)
    return [y[rows], plain.numpy()[rows]]
