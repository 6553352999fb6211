"""The compiled Blackwell kernel with 16-bit activations in the machine of ``tests/ptx``: every form
and format, under every schedule.
"""

import pytest
import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.ops.linear.cutedsl.gemm_config import budget
from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4
from tests.ops.linear.w16_problems import (
    FORMATS,
    PER_TOKEN,
    Form,
    W16Case,
    compiled,
    make_ids,
    make_operands,
    make_tokens,
    run,
    sort_pairs,
)
from tests.ptx.rounding import rounding
from tests.ptx.run import record_launches
from tests.ptx.schedule import SCHEDULES, Schedule, random_schedule

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")

F32 = torch.float32
FAST = W16Case("dense", MXFP4, 20, 24, 96, sides=1)
# Ragged tokens, features and columns; experts without pairs and with one.
EXACT = [
    *(W16Case("dense", format, 70, 200, 224) for format in FORMATS),
    *(W16Case("dense", format, 30, 144, 96, groups=2, sides=1) for format in FORMATS),
    *(W16Case("down", format, 23, 136, 160, F32) for format in FORMATS),
    *(W16Case("gate_up", format, 23, 72, 160) for format in FORMATS),
    *(W16Case("shared", format, 21, 136, 96) for format in FORMATS),
    W16Case("dense", NVFP4, 150, 40, 64, F32, tile_tokens=128),
    W16Case("dense", FP8, 70, 130, 64, F32, sides=1),
    W16Case("dense", BF16, 33, 20, 100),
    W16Case("down", MXFP4, 150, 20, 64, F32, tile_tokens=128),
    W16Case("gate_up", MXFP4, 150, 24, 64, tile_tokens=128),
]
SCHEDULED = {
    "dense": W16Case("dense", NVFP4, 70, 144, 208, groups=2),
    "down": W16Case("down", MXFP4, 11, 136, 224, F32),
    "gate_up": W16Case("gate_up", FP8, 20, 24, 320),
    "shared": W16Case("shared", BF16, 130, 24, 96),
}
# More fragments than stages: decoding could come round to a stage that is still on its way.
FEW_STAGES = W16Case("dense", BF16, 20, 24, 1280, F32, sides=1, tile_tokens=128)
# Warps that gather have tokens or none, by the tile; one of them stands still for a ring.
WITHOUT_TOKENS = W16Case("gate_up", BF16, 12, 24, 1664)
RANDOM = [
    W16Case("dense", NVFP4, 70, 200, 512, exact=False),
    W16Case("dense", FP8, 64, 128, 640, sides=1, exact=False),
    W16Case("dense", BF16, 64, 128, 448, sides=1, exact=False),
    W16Case("down", NVFP4, 20, 136, 448, F32, exact=False),
    W16Case("gate_up", MXFP4, 20, 72, 448, exact=False),
    W16Case("shared", NVFP4, 30, 72, 448, exact=False),
]


def assert_exact(case: W16Case, schedule_seed: int) -> None:
    operands = make_operands(case)
    found = run(case, operands, random_schedule(schedule_seed))
    assert_equal(found, operands.expected)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Bit for bit where there is a result, the poison elsewhere."""
    rounded = expected.float().to(found.dtype)
    different = (found != rounded) & ~(found.isnan() & rounded.isnan())
    assert int(different.sum()) == 0, f"{int(different.sum())} of {found.numel()} values differ"


def test_a_small_product() -> None:
    assert_exact(FAST, 0)


@pytest.mark.slow
def test_blocks_are_no_more_than_the_device_has_multiprocessors() -> None:
    kernel = compiled(FAST.config._replace(multiprocessors=3))
    (launch,) = record_launches(kernel, make_operands(FAST._replace(tokens=300)).arguments)
    assert launch.grid == (3, 1, 1)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(EXACT)), ids=[case.name for case in EXACT])
def test_exact_sums(index: int) -> None:
    """Every product and sum is exact, so that a wrong bit is a wrong address, phase or order."""
    assert_exact(EXACT[index], index)


def test_scheduled_products_go_round_every_ring() -> None:
    """More k tiles than stages and fragments, more work tiles than accumulators."""
    for form, case in SCHEDULED.items():
        found = budget(case.config)
        ids_TP = make_ids(case.tokens, torch.Generator().manual_seed(0))
        tiles = case.groups * ceil_div(case.tokens, case.tile_tokens)
        if case.sorted:
            tiles = int(sort_pairs(ids_TP).tile_count)
        assert tiles > found.accumulators
        assert tiles * ceil_div(case.columns, 64) > max(found.stages, found.fragments), form


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", SCHEDULED)
def test_any_schedule_gives_the_same(form: str, name: str) -> None:
    case = SCHEDULED[form]
    operands = make_operands(case)
    assert_equal(run(case, operands, SCHEDULES[name]), operands.expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late", "priority late"])
def test_no_stage_is_decoded_before_it_has_come(name: str) -> None:
    found = budget(FEW_STAGES.config)
    assert found.stages < found.fragments + 2
    operands = make_operands(FEW_STAGES)
    assert_equal(run(FEW_STAGES, operands, SCHEDULES[name]), operands.expected)


@pytest.mark.slow
def test_a_warp_without_tokens_keeps_up() -> None:
    operands = make_operands(WITHOUT_TOKENS)
    schedule = Schedule("a warp that stands still", "random", "priority", 1000, 510)
    assert_equal(run(WITHOUT_TOKENS, operands, schedule), operands.expected)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(RANDOM)), ids=[case.name for case in RANDOM])
def test_results_are_rounded_correctly(index: int) -> None:
    """At least 99.9 % of them, the others are 1 ulp away."""
    case = RANDOM[index]
    operands = make_operands(case)
    found = run(case, operands, random_schedule(index))
    written = ~operands.expected.isnan()
    assert torch.equal(~found.isnan(), written)
    codes = found[written].bfloat16().view(torch.uint16).numpy()
    share = rounding(codes, operands.expected[written].numpy())
    assert share.correct >= 0.999, share
    assert share.worst_ulps <= 1, share


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others() -> None:
    """Not on how many there are, nor on their order, their tile or their contents."""
    case = W16Case("dense", NVFP4, 70, 40, 192, sides=1, exact=False)
    operands = make_operands(case)
    together = run(case, operands, random_schedule(1))
    x, *others = operands.arguments
    few = [69, 3, 65]
    y = torch.full((3, *together.shape[1:]), torch.nan, dtype=together.dtype)
    arguments = [x[few].clone(), *others[:-3], y, *others[-2:]]
    alone = run(case, operands._replace(arguments=arguments, y=y), random_schedule(2))
    assert torch.equal(alone, together[few])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["down", "gate_up"])
def test_a_pair_does_not_depend_on_the_others(form: Form) -> None:
    """The same token and expert among 40 tokens and among 3, in other places of other tiles."""
    case = W16Case(form, NVFP4, 40, 24, 192, F32 if form == "down" else torch.bfloat16, exact=False)
    ids_TP = make_ids(40, torch.Generator().manual_seed(0))
    few = torch.tensor([35, 4, 14])
    rows = []
    for chosen in (torch.arange(40), few):
        operands = make_operands(case)
        x, *others = operands.arguments
        pairs = sort_pairs(ids_TP[chosen])
        slots = pairs.slots[: int((pairs.slots < len(chosen) * PER_TOKEN).sum())].long()
        if form == "gate_up":
            x = x[chosen].clone()
        else:
            # A hidden row is known by its pair.
            hidden = make_tokens(case, 40 * PER_TOKEN, torch.Generator().manual_seed(1))
            of_pair = chosen[slots // PER_TOKEN] * PER_TOKEN + slots % PER_TOKEN
            x = torch.zeros_like(hidden[: len(chosen) * PER_TOKEN])
            x[: len(slots)] = hidden[of_pair]
        routing = (
            others[9].view(40, PER_TOKEN)[chosen].flatten() if form == "gate_up" else others[9]
        )
        y = torch.full((ids_TP[chosen].numel(), 1, 24), torch.nan, dtype=case.out_dtype)
        lists = [pairs.tiles, pairs.tile_count, pairs.slots, routing]
        arguments = [x, *others[:6], *lists, y, *others[-2:]]
        found = run(case, operands._replace(arguments=arguments, y=y), random_schedule(len(chosen)))
        by_pair = torch.full((len(chosen) * PER_TOKEN, 24), torch.nan, dtype=case.out_dtype)
        by_pair[slots] = found[slots, 0] if form == "down" else found[: len(slots), 0]
        rows.append(by_pair.view(len(chosen), PER_TOKEN, 24))
    together, alone = rows
    assert torch.equal(alone.nan_to_num(7.5), together[few].nan_to_num(7.5))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["down", "gate_up"])
def test_no_pairs(form: Form) -> None:
    """All ids may be no experts: nothing is written, and tensor memory is freed."""
    case = SCHEDULED[form]
    operands = make_operands(case)
    tile_count = operands.arguments[8]
    assert int(tile_count) > 0
    tile_count.zero_()
    assert bool(run(case, operands, random_schedule(4)).isnan().all())


@pytest.mark.slow
def test_nan_and_infinity_stay_in_their_row() -> None:
    """NaN passes the clamps of the gate."""
    case = W16Case("shared", BF16, 20, 24, 96)
    operands = make_operands(case)
    x = operands.arguments[0]
    x[5, 0, 7] = torch.nan
    found = run(case, operands, random_schedule(3))
    assert bool(found[5].isnan().all())
    operands.expected[5] = torch.nan
    assert_equal(found, operands.expected)
