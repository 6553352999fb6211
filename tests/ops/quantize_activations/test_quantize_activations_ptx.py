"""The quantisers' sm_100a build, executed on the CPU, against the torch ones, byte for byte."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops import quantize_activations as reference
from dsv4.ops.moe.sorted_pairs import sort_by_expert
from dsv4.ops.norm.cuda import rms_norm
from dsv4.ops.quantize_activations import ActivationFormat, cuda, hidden_global_scale
from tests.ops.cases import normal
from tests.ops.quantize_activations.values import all_bfloat16, rows_of_tiles, swizzled
from tests.ops.recorded import BLACKWELL
from tests.ptx.nvrtc import run_recorded

FORMATS = list(ActivationFormat)
FP8 = ActivationFormat.FP8
NVFP4 = ActivationFormat.NVFP4
RESULTS = ("codes", "scales", "global_scale")
# Of a lane.
COLUMNS = 8


def poisoned(launch: Launch) -> dict[str, Tensor]:
    """Memory for the results of a launch, of which every byte is 0xA5."""
    found = {}
    for name in RESULTS:
        argument = launch.arguments[name]
        if isinstance(argument, Tensor):
            found[name] = torch.full((argument.nbytes,), 0xA5, dtype=torch.uint8)
    return found


def assert_bytes(
    found: dict[str, Tensor], wanted: tuple[Tensor, Tensor, Tensor | None], untouched: bool = False
) -> None:
    """Results begin with what is wanted; ``untouched``: nothing was written behind it."""
    for name, whole in zip(RESULTS, wanted, strict=True):
        if whole is None:
            continue
        part = found[name][: whole.nbytes]
        if name == "global_scale":
            numbers = part.view(torch.float32)
            same = (numbers == whole) | (numbers.isnan() & whole.isnan())
            assert bool(same.all()), f"{name}: {int((~same).sum())} rows differ"
        else:
            different = int((part != whole.view(torch.uint8).flatten()).sum())
            assert different == 0, f"{name}: {different} bytes differ"
        assert not untouched or bool((found[name][whole.nbytes :] == 0xA5).all()), name


def assert_same(
    x: Tensor, format: ActivationFormat, global_scale: float | None = None, most: int | None = None
) -> None:
    """Rows x ``[T, K]``, of a recording for up to ``most`` tokens."""
    tokens = len(x)
    recording = Recording(BLACKWELL, most or tokens)
    like = recording.empty((most or tokens, x.stride(0)), torch.bfloat16)
    first = x.storage_offset()
    rows = like[:, first : first + x.shape[1]]
    cuda.quantize_rows(recording, rows, format, global_scale=global_scale)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    found = poisoned(launch)
    run_recorded(launch, "sm_100a", {"x": x, **found}, tokens)
    wanted = swizzled(reference.quantize_rows(x, format, global_scale))
    assert_bytes(found, wanted, untouched=True)


def every_value(offset: int) -> Tensor:
    """bfloat16 ``[256, 256]``: every bit pattern once, ``offset`` columns to the right."""
    return all_bfloat16().roll(offset).view(256, 256)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_all_kinds(format: ActivationFormat) -> None:
    x = torch.cat((every_value(3)[::29], normal(3, 256, seed=1).bfloat16()))
    x[2] = 0
    x[4] = -0.0
    x[5, 17] = math.nan
    x[6, 255] = -math.inf
    assert_same(x, format)


# What is infinite in float32 is meant to be.
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "global_scale", "lanes"),
    [(FP8, None, 16), (NVFP4, None, 2), (NVFP4, hidden_global_scale(10.0, 1.5), 2)],
)
def test_every_value_in_every_place(
    format: ActivationFormat, global_scale: float | None, lanes: int
) -> None:
    """Of the 8 columns that a lane has, and of the lanes whose columns share a scale. (A lane has
    no instructions of its own, so that every column with every lane is not needed.)
    """
    places = {*range(COLUMNS), *range(0, COLUMNS * lanes, COLUMNS)}
    for place in sorted(places):
        assert_same(every_value(place), format, global_scale)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [8, 72, 301, 1536, 8256])
@pytest.mark.parametrize("format", FORMATS)
def test_widths_and_shorter_chunks(format: ActivationFormat, columns: int) -> None:
    x = normal(9, columns, seed=columns).bfloat16()
    assert_same(x, format, most=200)
    assert_same(normal(9, columns + 9, seed=2).bfloat16()[:, 1 : columns + 1], format)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_experts(format: ActivationFormat) -> None:
    experts, tokens, per_token = 5, 40, 4
    x = normal(tokens, 256, seed=3).bfloat16()
    ids = normal(tokens, experts, seed=4).topk(per_token, dim=1).indices
    ids[:, 0] = 1  # more than a tile of pairs
    ids[3, 1] = -1  # no expert
    recording = Recording(BLACKWELL, tokens)
    like = recording.empty((tokens, 256), torch.bfloat16)
    like_ids = recording.empty((tokens, per_token), torch.int64)
    pairs = sort_by_expert(recording, like_ids, experts)
    cuda.quantize_sorted_rows(recording, like, pairs, format)
    sort, quantize = recording.items
    assert isinstance(sort, Launch)
    assert isinstance(quantize, Launch)
    sorted_pairs = {
        name: torch.full((part.nbytes // 4,), -1, dtype=torch.int32)
        for name, part in sort.arguments.items()
        if isinstance(part, Tensor) and name != "ids"
    }
    run_recorded(sort, "sm_100a", {"ids": ids, **sorted_pairs}, tokens)
    found = poisoned(quantize)
    run_recorded(quantize, "sm_100a", {"x": x, **sorted_pairs, **found}, tokens)
    tiles = sorted_pairs["tiles"].view(-1, 4)[: int(sorted_pairs["tile_count"])]
    wanted = rows_of_tiles(x, sorted_pairs["slots"] // per_token, tiles, format)
    assert_bytes(found, wanted, untouched=True)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [200, 1024])
@pytest.mark.parametrize("format", FORMATS)
def test_the_norm_is_that_of_its_kernel(format: ActivationFormat, columns: int) -> None:
    x = normal(9, columns, seed=5).bfloat16()
    weight = normal(columns, seed=6)
    recording = Recording(BLACKWELL, 9)
    like = recording.empty((9, columns), torch.bfloat16)
    like_weight = recording.empty((columns,), torch.float32)
    rms_norm(recording, like, like_weight, 1e-6)
    cuda.quantize_rows(recording, like, format, like_weight, 1e-6)
    norm, quantize = recording.items
    assert isinstance(norm, Launch)
    assert isinstance(quantize, Launch)
    y = torch.full_like(x, math.nan)
    run_recorded(norm, "sm_100a", {"x": x, "weight": weight, "y": y}, 9)
    found = poisoned(quantize)
    run_recorded(quantize, "sm_100a", {"x": x, "norm_weight": weight, **found}, 9)
    assert_bytes(found, swizzled(reference.quantize_rows(y, format)))
