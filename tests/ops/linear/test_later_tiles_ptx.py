"""Matrices that serve the indexer's choice, executed on the CPU: blocks multiply them behind the
others, and steps that leave them out give the others the same bits.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode, linear
from dsv4.ops.linear.row_list import PackedRows, pack_rows, packed_rows
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.linear.normal_weight import normal_weight
from tests.ops.linear.test_decode_linear_ptx import assert_product
from tests.ptx.faults import OutOfBounds
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
NVFP4 = QuantFormat.NVFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
# (format, rows, rows for the choice, K, tokens, blocks): blocks without later tiles, without enough
# stages for their ring, and with more tiles than warps.
LISTS = [
    (FP8, 200, 72, 256, 1, 2),
    (NVFP4, 72, 16, 512, 3, 4),
    (BF16, 16, 200, 64, 8, 3),
    (FP8, 300, 300, 128, 2, 1),
]
FAULTS = {
    "their outputs go where the others' go": SourceEdit(
        "decode_products.cuh", "share.begin = p.first.tiles + ", "share.begin = "
    ),
    "they are requested too far behind": SourceEdit(
        "decode_linear.cu", "--ahead, next.fetch(free, lane)", "next.fetch(free, lane)"
    ),
    "their sums lie on those of the others": SourceEdit(
        "decode_linear.cu", "partials += (tiles + WARPS - 1)", "partials += (tiles - 1)"
    ),
}


def packed(format: QuantFormat, counts: tuple[int, int], columns: int) -> PackedRows:
    dtypes = [torch.bfloat16, torch.float32]
    matrices = [normal_weight(format, count, columns) for count in counts]
    return replace(packed_rows(pack_rows(matrices, dtypes)), for_choice=1)


def products(
    rows: PackedRows,
    x: Tensor,
    blocks: int,
    dense: bool = False,
    schedule: str = "random",
    edit: SourceEdit | None = None,
) -> tuple[Tensor, ...]:
    """What the kernel computes: NaN where it stores nothing."""
    tokens, columns = x.shape
    recording = Recording(Target(torch.device("cpu"), ARCHITECTURE, blocks), tokens)
    selected = recording.empty((1,), torch.int64)
    decode.linear_rows(recording, x, rows, torch.ones(columns), 1e-6)
    recording.choose(selected, 1)
    assert recording.leave_choice_out(selected)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    shape = launch.dense_shape if dense else launch.shape
    assert shape is not None
    memory = torch.full((-(-tokens * rows.bytes_per_token // 4),), torch.nan)
    launch = replace(launch, shape=shape, arguments={**launch.arguments, **shape.numbers})
    run_recorded(launch, ARCHITECTURE, {"y": memory}, tokens, SCHEDULES[schedule], edit=edit)
    return rows.products(memory, tokens)


def assert_products(
    found: tuple[Tensor, ...], x: Tensor, format: QuantFormat, counts: tuple[int, int]
) -> None:
    for product, count in zip(found, counts, strict=True):
        stored = normal_weight(format, count, x.shape[1])
        assert_product(product, linear(normalised(x), stored, product.dtype))


def normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("format", "rows", "chosen", "columns", "tokens", "blocks", "schedule"),
    [(*one, name) for n, one in enumerate(LISTS) for name in list(SCHEDULES)[n % 2 :: 2]],
    ids=str,
)
def test_both_products_are_right_and_dense_steps_have_the_same_bits(
    format: QuantFormat,
    rows: int,
    chosen: int,
    columns: int,
    tokens: int,
    blocks: int,
    schedule: str,
) -> None:
    listed = packed(format, (rows, chosen), columns)
    x = normal(tokens, columns, seed=1).bfloat16()
    found = products(listed, x, blocks, schedule=schedule)
    assert_products(found, x, format, (rows, chosen))
    wanted, left_out = products(listed, x, blocks, dense=True, schedule=schedule)
    assert torch.equal(wanted, found[0])
    assert left_out.isnan().all()


def test_tokens_have_the_bits_that_they_have_among_eight() -> None:
    listed = packed(FP8, (72, 40), 256)
    x = normal(8, 256, seed=1).bfloat16()
    among_eight = products(listed, x, 2)
    for tokens in (1, 3, 6):
        for found, expected in zip(products(listed, x[:tokens], 2), among_eight, strict=True):
            assert torch.equal(found, expected[:tokens])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    counts = (200, 72)
    x = normal(1, 256, seed=1).bfloat16()
    with pytest.raises((AssertionError, OutOfBounds)):
        assert_products(
            products(packed(FP8, counts, 256), x, 2, edit=FAULTS[fault]), x, FP8, counts
        )
