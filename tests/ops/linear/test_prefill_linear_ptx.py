"""Products of a prompt, executed on the CPU as Hopper and other GPUs have them: every width of a
tile, groups, sums of splits over K, and odd sizes, against float64.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from dsv4.integers import round_up
from dsv4.launch.items import Call, Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import prefill
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.cases import assert_rounded_once, normal
from tests.ops.executed import execute
from tests.ops.linear.normal_weight import normal_weight
from tests.ops.recorded import shape_at
from tests.ptx.faults import OutOfBounds
from tests.ptx.nvrtc import SourceEdit
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
CPU = torch.device("cpu")
F32 = torch.float32
ROUNDED = torch.bfloat16
# wgmma and mma.sync: every format with a result of either type.
BUILDS = [
    ("sm_90a", NVFP4, ROUNDED),
    ("sm_90a", MXFP4, F32),
    ("sm_90a", FP8, ROUNDED),
    ("sm_90a", BF16, F32),
    ("sm_100a", NVFP4, F32),
    ("sm_100a", MXFP4, ROUNDED),
    ("sm_100a", FP8, F32),
    ("sm_100a", BF16, ROUNDED),
]
# What float32 sums add, relative to the largest product.
SUMMED = 3e-6
FAULTS = {
    "splits are added up before the last one has come": SourceEdit(
        "prefill_parts.cuh", "(counter) < g.splits)", "(counter) < g.splits - 1)"
    ),
    "the scale of the first step is that of all": SourceEdit(
        "prefill_tiles.cuh", "row + min((step + 1) / 2, last)", "row"
    ),
    "x behind the last column is read": SourceEdit(
        "prefill_gemm.cuh", "max(0, min(16, 2 * (g.columns - column)))", "16"
    ),
}


class Product(NamedTuple):
    """One product ``[T, G·R]`` of K columns, and the multiprocessors that share it. ``most``
    tokens: for which it is recorded.
    """

    tokens: int
    rows: int
    columns: int
    groups: int = 1
    multiprocessors: int = 1
    most: int = 0

    def assert_exact(
        self,
        architecture: str,
        format: QuantFormat,
        dtype: torch.dtype,
        splits: int = 1,
        edit: SourceEdit | None = None,
        schedule: str = "random",
    ) -> None:
        """The result, against float64; ``splits``: of K, expected."""
        most = max(self.tokens, self.most)
        stored = weight_of(format, self.groups * self.rows, self.columns)
        x_TGK = normal(most, self.groups, self.columns, seed=1, dtype=torch.bfloat16)
        # Behind the last column is NaN, to a multiple of 16 bytes.
        wide = torch.full((*x_TGK.shape[:2], round_up(self.columns, 8) + 8), torch.nan).bfloat16()
        wide[..., : self.columns] = x_TGK
        recording = Recording(Target(CPU, architecture, self.multiprocessors), most)
        x = wide[..., : self.columns]
        y = (
            prefill.linear(recording, x[:, 0], pack_weight(stored), dtype)
            if self.groups == 1
            else prefill.grouped_linear(recording, x, pack_weight(stored))
        )
        for item in recording.items:
            assert isinstance(item, Call) or splits_of(item, self.tokens) == splits
        found = execute(recording, self.tokens, edit, SCHEDULES[schedule])(y)
        weight_GRK = stored.dequantize().double().unflatten(0, (self.groups, self.rows))
        exact = torch.einsum("tgk,grk->tgr", x_TGK.double(), weight_GRK).view(y.shape)
        assert_rounded_once(found[: self.tokens], exact[: self.tokens], SUMMED)
        assert found[self.tokens :].isnan().all(), "other tokens are not written"


def weight_of(format: QuantFormat, rows: int, columns: int) -> QuantTensor:
    """Scales of blocks are no powers of two, and no two are alike."""
    weight = normal_weight(format, rows, columns)
    if format is not FP8:
        return weight
    assert weight.block_scale is not None
    return replace(weight, block_scale=normal(*weight.block_scale.shape, seed=2).abs() + 0.01)


def splits_of(launch: Launch, tokens: int) -> int:
    shape = shape_at(launch, tokens)
    assert isinstance(shape, Shape)
    return int(shape.numbers["splits"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("architecture", "format", "dtype"), BUILDS, ids=str)
def test_tiles_of_every_width_and_splits(
    architecture: str, format: QuantFormat, dtype: torch.dtype
) -> None:
    """A block multiplies several tiles in turn, the last ones not full; then blocks have parts of
    K, of unequal lengths.
    """
    Product(9, 300, 64).assert_exact(architecture, format, dtype)
    Product(40, 72, 96, most=140).assert_exact(architecture, format, dtype)
    Product(130, 40, 64, most=140).assert_exact(architecture, format, dtype)
    split = Product(9, 40, 576, multiprocessors=2)
    split.assert_exact(architecture, format, dtype, splits=2)


@pytest.mark.parametrize(("architecture", "format"), [("sm_90a", FP8), ("sm_100a", MXFP4)])
def test_groups(architecture: str, format: QuantFormat) -> None:
    """Groups of whole row tiles, of parts of one, and some whose K is split."""
    Product(20, 48, 64, groups=3).assert_exact(architecture, format, ROUNDED)
    Product(9, 4, 64, groups=2, most=12).assert_exact(architecture, format, ROUNDED)
    split = Product(9, 32, 576, groups=2, multiprocessors=5)
    split.assert_exact(architecture, format, ROUNDED, splits=2)


@pytest.mark.parametrize(("architecture", "dtype"), [("sm_90a", F32), ("sm_100a", ROUNDED)])
def test_odd_sizes(architecture: str, dtype: torch.dtype) -> None:
    for tokens, rows, columns in ((9, 1, 1), (17, 7, 3), (40, 65, 33), (10, 129, 100)):
        Product(tokens, rows, columns, most=tokens + 3).assert_exact(architecture, BF16, dtype)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    """In one order of blocks and copies, if not in the first."""
    with pytest.raises((AssertionError, OutOfBounds)):
        assert_right_in_every_order(FAULTS[fault], FP8 if "scale" in fault else BF16)


def assert_right_in_every_order(edit: SourceEdit, format: QuantFormat) -> None:
    for schedule in SCHEDULES:
        product = Product(9, 40, 804, multiprocessors=3)
        product.assert_exact("sm_90a", format, F32, 3, edit, schedule)
