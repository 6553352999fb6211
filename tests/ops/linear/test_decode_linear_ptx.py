"""The decode kernel's launches, executed on the CPU: more tiles than warps, lists of two formats,
groups that share tiles, and K in slices.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode, decode_plan, decode_product, grouped_linear, linear
from dsv4.ops.linear.row_list import pack_rows, packed_rows
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.linear.normal_weight import normal_weight
from tests.ptx import program
from tests.ptx.faults import OutOfBounds, Trap
from tests.ptx.nvrtc import SourceEdit, ptx_of, run_recorded
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
# Of float32 sums in another order, in roundings of the largest magnitude of a row's products.
BOUND = 64 * 2.0**-24
FAULTS = {
    "later tiles go where the first one went": SourceEdit(
        "decode_products.cuh", "CLUSTER == 1 && tile >= WARPS", "CLUSTER == 2 && tile >= WARPS"
    ),
    "the last warp of a tile is left out": SourceEdit(
        "decode_products.cuh", "warp <= sharers.last ?", "warp < sharers.last ?"
    ),
}

FAULTS_OF_FIVE = {
    "sums of a token that is not there are kept": SourceEdit(
        "decode_products.cuh", "odd = 2 * token + 1 < TOKENS", "odd = 2 * token < TOKENS"
    ),
    "a token's sums are dropped": SourceEdit(
        "decode_products.cuh", "even = 2 * token < TOKENS", "even = 2 * token + 1 < TOKENS"
    ),
    "tokens sit in the columns of up to four": SourceEdit(
        "weight_tile.cuh", "T > 4 ? min(group, T - 1)", "T > 5 ? min(group, T - 1)"
    ),
}


def only(recorded: Recording) -> Launch:
    (launch,) = recorded.items
    assert isinstance(launch, Launch)
    return launch


def run(
    recording: Recording, memory: Tensor, schedule: str = "random", edit: SourceEdit | None = None
) -> None:
    run_recorded(
        only(recording),
        ARCHITECTURE,
        {"y": memory},
        recording.tokens,
        SCHEDULES[schedule],
        edit=edit,
    )


def recording(tokens: int, multiprocessors: int) -> Recording:
    return Recording(Target(torch.device("cpu"), ARCHITECTURE, multiprocessors), tokens)


def assert_product(found: Tensor, expected: Tensor) -> None:
    """Within ``BOUND``, and one rounding of bfloat16 results."""
    rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 0.0
    assert torch.isfinite(found).all()
    room = BOUND * expected.float().abs().max() + rounding * expected.float().abs()
    assert ((found.float() - expected.float()).abs() <= room).all()


def single(
    format: QuantFormat,
    rows: int,
    columns: int,
    tokens: int,
    blocks: int,
    edit: SourceEdit | None = None,
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, and what it should."""
    x = normal(tokens, columns, seed=1).bfloat16()
    found = product(x, format, rows, blocks, edit)
    return found, linear(x, normal_weight(format, rows, columns), torch.float32)


def product(
    x: Tensor, format: QuantFormat, rows: int, blocks: int = 2, edit: SourceEdit | None = None
) -> Tensor:
    """What the kernel computes with ``normal_weight(format, rows, ...)``: float32."""
    tokens, columns = x.shape
    recorded = recording(tokens, blocks)
    decode.linear(recorded, x, pack_weight(normal_weight(format, rows, columns)), torch.float32)
    memory = torch.full((tokens, rows), torch.nan)
    run(recorded, memory, edit=edit)
    return memory


@pytest.mark.parametrize(
    ("format", "rows", "columns", "tokens", "blocks"),
    [
        (FP8, 592, 256, 1, 2),
        (NVFP4, 200, 512, 2, 1),
        (MXFP4, 592, 96, 3, 2),
        (FP8, 200, 160, 5, 1),
        (NVFP4, 40, 512, 6, 1),
        (BF16, 200, 96, 7, 2),
        (BF16, 40, 64, 8, 3),
        (FP8, 16, 2048, 1, 1),
    ],
    ids=str,
)
def test_a_matrix(format: QuantFormat, rows: int, columns: int, tokens: int, blocks: int) -> None:
    assert_product(*single(format, rows, columns, tokens, blocks))


@pytest.mark.parametrize(
    ("format", "rows", "columns"),
    [(NVFP4, 40, 512), (MXFP4, 40, 160), (FP8, 56, 384), (BF16, 40, 128)],
    ids=str,
)
def test_tokens_have_the_bits_that_they_have_among_eight(
    format: QuantFormat, rows: int, columns: int
) -> None:
    """Rows of very different sizes."""
    x = (normal(8, columns, seed=1) * torch.logspace(-9, 9, 8)[:, None]).bfloat16()
    among_eight = product(x, format, rows)
    for tokens in (3, 5, 6, 7):
        assert torch.equal(product(x[:tokens], format, rows), among_eight[:tokens])


@pytest.mark.parametrize("tokens", [3, 5])
def test_nan_stays_with_its_token(tokens: int) -> None:
    """Also where columns of an MMA that have no token repeat its row."""
    x = normal(tokens, 64, seed=1).bfloat16()
    expected = product(x, FP8, 24)
    for token in (0, tokens - 1):
        others = torch.arange(tokens) != token
        x_nan = x.clone()
        x_nan[token, 5] = torch.nan
        found = product(x_nan, FP8, 24)
        assert torch.equal(found[others], expected[others])
        assert found[token].isnan().all()


@pytest.mark.parametrize("columns", [256, 4096])
def test_normalised_tokens_have_the_bits_that_they_have_among_eight(columns: int) -> None:
    rows = pack_rows([normal_weight(FP8, 24, columns)], [torch.float32])
    norm_weight = normal(columns, seed=2)
    x = (normal(8, columns, seed=1) * torch.logspace(-9, 9, 8)[:, None]).bfloat16()
    found = []
    for tokens in (8, 3, 6):
        recorded = recording(tokens, 2)
        decode.linear_rows(recorded, x[:tokens], rows, norm_weight, 1e-6)
        found.append(torch.full((tokens, 24), torch.nan))
        run(recorded, found[-1])
        assert torch.equal(found[-1], found[0][:tokens])
    assert torch.isfinite(found[0]).all()


def defines(recorded: Recording) -> dict[str, int]:
    return dict(only(recorded).shape.kernel.defines)


def test_rows_of_x_that_are_not_aligned() -> None:
    """They are read one by one, by a function that the machine does not call."""
    rows = torch.zeros(3, 136, dtype=torch.bfloat16)
    packed = pack_weight(normal_weight(FP8, 24, 128))
    for x, aligned in ((rows[:, 8:], 1), (rows[:, 1:129], 0), (rows[:, :132][:, 4:], 0)):
        recorded = recording(3, 1)
        decode.linear(recorded, x, packed)
        assert defines(recorded)["ALIGNED_X"] == aligned


def test_rings_begin_on_a_line_of_shared_memory() -> None:
    recorded = recording(1, 1)
    decode.linear(
        recorded, normal(1, 256, seed=1).bfloat16(), pack_weight(normal_weight(NVFP4, 16, 256))
    )
    kernel = only(recorded).shape.kernel
    (loaded,) = program.load(ptx_of(kernel.source, ARCHITECTURE, kernel.defines)).values()
    alignments = [v.align for v in loaded.function.variables if v.space == "shared" and not v.size]
    assert alignments == [128]


@pytest.mark.parametrize(
    ("format", "tokens"), [(NVFP4, 1), (MXFP4, 3), (FP8, 4), (BF16, 5), (FP8, 7), (FP8, 8)], ids=str
)
def test_a_plan_has_the_memory_that_the_kernel_takes(
    format: QuantFormat, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel traps where it has less. Here the plan asks for no more than it has counted."""
    monkeypatch.setattr(decode_plan, "LEAST_SHARED", 0)
    monkeypatch.setattr(decode_product, "plan_linear", decode_plan.plan_linear.__wrapped__)
    recorded = recording(tokens, 2)
    x = normal(tokens, 96, seed=1).bfloat16()
    decode.linear(recorded, x, pack_weight(normal_weight(format, 40, 96)))
    memory = torch.full((tokens, 40), torch.nan, dtype=torch.bfloat16)
    run(recorded, memory)
    assert torch.isfinite(memory).all()
    launch = only(recorded)
    less = replace(launch.shape, shared_bytes=launch.shape.shared_bytes - 4)
    recorded.items[:] = [replace(launch, shape=less)]
    with pytest.raises(Trap):
        run(recorded, memory)


def test_slices_one_after_the_other() -> None:
    """One multiprocessor has no cluster, and a thread no room for its columns of 8 tokens."""
    tokens, columns = 8, 10240
    recorded = recording(tokens, 1)
    x = normal(tokens, columns, seed=1).bfloat16()
    stored = normal_weight(FP8, 16, columns)
    decode.linear(recorded, x, pack_weight(stored), torch.float32)
    assert (defines(recorded)["TURNS"], defines(recorded)["HOLDS_SLICE"]) == (2, 0)
    memory = torch.full((tokens, 16), torch.nan)
    run(recorded, memory)
    assert_product(memory, linear(x, stored, torch.float32))


@pytest.mark.parametrize("tokens", [5, 8])
def test_blocks_of_a_cluster_add_up_their_slices(tokens: int) -> None:
    """Three tiles: one block finishes two of them, the other one."""
    x = normal(tokens, 16384, seed=1).bfloat16()
    stored = normal_weight(FP8, 48, 16384)
    recorded = recording(tokens, 2)
    decode.linear(recorded, x, pack_weight(stored), torch.float32)
    assert defines(recorded)["CLUSTER"] == 2
    memory = torch.full((tokens, 48), torch.nan)
    run(recorded, memory)
    assert_product(memory, linear(x, stored, torch.float32))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_product(*single(FP8, 592, 256, 1, 2, FAULTS[fault]))


@pytest.mark.parametrize("fault", FAULTS_OF_FIVE)
def test_a_fault_of_five_tokens_is_seen(fault: str) -> None:
    with pytest.raises((AssertionError, OutOfBounds)):
        assert_product(*single(FP8, 264, 256, 5, 1, FAULTS_OF_FIVE[fault]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_list(schedule: str) -> None:
    matrices = [
        normal_weight(NVFP4, 40, 128),
        normal_weight(NVFP4, 24, 128),
        normal_weight(BF16, 200, 128),
    ]
    rows = pack_rows(matrices, [None, None, torch.float32])
    x = normal(3, 128, seed=1).bfloat16()
    recorded = recording(3, 4)
    decode.linear_rows(recorded, x, rows)
    memory = torch.full((-(-3 * packed_rows(rows).bytes_per_token // 4),), torch.nan)
    run(recorded, memory, schedule)
    for found, stored in zip(packed_rows(rows).products(memory, 3), matrices, strict=True):
        assert_product(found, linear(x, stored, found.dtype))


def test_groups_that_share_tiles() -> None:
    stored = normal_weight(BF16, 40, 96)
    x = normal(2, 2, 96, seed=1).bfloat16()
    recorded = recording(2, 4)
    decode.grouped_linear(recorded, x, pack_weight(stored))
    memory = torch.full((2, 2, 20), torch.nan, dtype=torch.bfloat16)
    run(recorded, memory)
    assert_product(memory, grouped_linear(x, stored))
