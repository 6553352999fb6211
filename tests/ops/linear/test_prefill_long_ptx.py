"""Products of long steps by TMA, executed on the CPU: both tiles, groups, rows and columns that
fill no tile, against float64 and bit for bit against the form of shorter steps.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import prefill, prefill_long
from dsv4.ops.linear.prefill_long import HALF, LARGE, Fastest
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import assert_rounded_once, normal
from tests.ops.executed import execute
from tests.ops.linear.test_prefill_linear_ptx import (
    BF16,
    CPU,
    F32,
    FP8,
    MXFP4,
    NVFP4,
    ROUNDED,
    SUMMED,
    weight_of,
)
from tests.ops.recorded import shape_at
from tests.ptx.faults import Deadlock, MissingFence, RegisterBudget
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

FAULTS = {
    "the second half of the tokens is the first one": SourceEdit(
        "prefill_long_sm90.cu", "t.first + i, full", "t.first, full"
    ),
    "every block has the first rows": SourceEdit(
        "prefill_long_sm90.cu", "t.expert * g.row_tiles + first_row_tile(g, t, 0)", "0"
    ),
    "stages are not awaited": SourceEdit("prefill_wgmma.cuh", "pipe.wait_full();", ""),
    "a stage has more bytes than it gets": SourceEdit(
        "prefill_long_sm90.cu", "barrier_expect(full, STAGE_USED)", "barrier_expect(full, 1 << 16)"
    ),
    "waiting results are read at once": SourceEdit(
        "prefill_lines.cuh", "        group_sync(group);\n#pragma", "#pragma"
    ),
    "results have the wrong places": SourceEdit(
        "prefill_lines.cuh", "((thread % 8) ^ waiting % 8) * 16", "(thread % 8) * 16"
    ),
    "consumers ask for more registers than there are": SourceEdit(
        "prefill_tiles.cuh", "CONSUMERS == 12 ? 32 : 24", "32"
    ),
}


def products(
    tokens: int,
    most: int,
    sizes: tuple[int, int, int],
    format: QuantFormat,
    dtype: torch.dtype,
    multiprocessors: int = 2,
    edit: SourceEdit | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """By both forms and in float64, of the ``tokens`` first of ``most`` rows. ``sizes``: groups,
    rows of one, columns.
    """
    groups, rows, columns = sizes
    stored = weight_of(format, groups * rows, columns)
    x_TGK = normal(most, groups, columns, seed=1, dtype=torch.bfloat16)
    found = []
    for form in (prefill_long, prefill):
        recording = Recording(Target(CPU, "sm_90a", multiprocessors), most)
        weight = pack_weight(stored)
        y = (
            form.linear(recording, x_TGK[:, 0], weight, dtype)
            if groups == 1
            else form.grouped_linear(recording, x_TGK, weight)
        )
        result = execute(recording, tokens, edit if form is prefill_long else None)(y)
        assert result[tokens:].isnan().all(), "other tokens are not written"
        found.append(result[:tokens])
    weight_GRK = stored.dequantize().double().unflatten(0, (groups, rows))
    exact = torch.einsum("tgk,grk->tgr", x_TGK[:tokens].double(), weight_GRK)
    return found[0], found[1], exact.view(found[0].shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("format", "dtype"),
    [(NVFP4, ROUNDED), (MXFP4, F32), (FP8, ROUNDED), (BF16, F32), (BF16, ROUNDED)],
)
def test_equals_the_form_of_shorter_steps(format: QuantFormat, dtype: torch.dtype) -> None:
    """Tiles of every width, the last one not full, of rows that fill one block and half of another;
    on one multiprocessor a block computes one tile after the other.
    """
    for tokens, multiprocessors, tile in (
        (150, 4, HALF),
        (180, 4, HALF),
        (560, 1, LARGE),
        (612, 1, LARGE),
    ):
        assert Fastest(format, 2, multiprocessors).tile(tokens) == tile
        sizes = (1, 192, 160)
        long, short, exact = products(tokens, 620, sizes, format, dtype, multiprocessors)
        assert_rounded_once(long, exact, SUMMED)
        assert torch.equal(long, short)


def test_groups() -> None:
    for format in (FP8, NVFP4):
        long, short, exact = products(140, 140, (2, 128, 64), format, ROUNDED)
        assert_rounded_once(long, exact, SUMMED)
        assert torch.equal(long, short)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    try:
        long, short, _ = products(250, 250, (1, 192, 160), BF16, ROUNDED, 1, FAULTS[fault])
    except (Deadlock, MissingFence, RegisterBudget):
        return
    assert not torch.equal(long, short)


def test_groups_that_share_a_block_are_left_to_the_other_form() -> None:
    recording = Recording(Target(CPU, "sm_90a", 132), 512)
    x = torch.empty(512, 2, 64).bfloat16()
    prefill_long.grouped_linear(recording, x, pack_weight(weight_of(BF16, 2 * 64, 64)))
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    assert launch.signature.kernel == "prefill_linear"


def test_what_is_launched_for_shorter_steps() -> None:
    """And for operands whose rows are no whole lines."""
    weight = pack_weight(weight_of(BF16, 192, 64))
    recording = Recording(Target(CPU, "sm_90a", 132), 512)
    prefill_long.linear(recording, torch.empty(512, 64).bfloat16(), weight)
    for tokens in (9, 128, 129, 512):
        launched = [
            item.signature.kernel
            for item in recording.items
            if isinstance(item, Launch) and shape_at(item, tokens) is not None
        ]
        assert launched == ["long_linear" if tokens > 128 else "prefill_linear"]
    wide = torch.empty(512, 72).bfloat16()
    for target, rows, columns in (("sm_100a", 192, 64), ("sm_90a", 200, 64), ("sm_90a", 192, 66)):
        other = Recording(Target(CPU, target, 132), 512)
        weight = pack_weight(weight_of(BF16, rows, columns))
        prefill_long.linear(other, wide[:, :columns], weight)
        (launch,) = other.items
        assert isinstance(launch, Launch)
        assert launch.signature.kernel == "prefill_linear"


@pytest.mark.parametrize(
    ("row_blocks", "tokens", "tile"),
    [
        # Rows of Flash on 132 multiprocessors: o_b, o_a, query rows.
        (32, 256, HALF),
        (32, 512, HALF),
        (32, 768, LARGE),
        (64, 256, HALF),
        (64, 384, LARGE),
        (256, 129, LARGE),
        (256, 256, LARGE),
        (256, 4096, LARGE),
    ],
)
def test_the_tile_leaves_few_multiprocessors_without_work(
    row_blocks: int, tokens: int, tile: prefill.Tile
) -> None:
    assert Fastest(FP8, row_blocks, 132).tile(tokens) == tile


def test_small_tiles_of_fp8_cost_more() -> None:
    """Three waves of small tiles, or two of large ones: FP8 takes more to decode."""
    found = [Fastest(format, 64, 132).tile(768) for format in (FP8, NVFP4, MXFP4, BF16)]
    assert found == [LARGE, HALF, HALF, HALF]
