"""Quantisers on the GPU against the torch ones, byte for byte."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops import quantize_activations as reference
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.moe.sorted_pairs import sort_by_expert
from dsv4.ops.norm.cuda import rms_norm
from dsv4.ops.quantize_activations import ActivationFormat, cuda, hidden_global_scale
from dsv4.ops.quantize_activations.cuda import SwizzledRows
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.quantize_activations.values import rows_of_all_values, rows_of_tiles, swizzled

pytestmark = pytest.mark.gpu

FORMATS = list(ActivationFormat)
HIDDEN = hidden_global_scale(10.0, 1.5)
EPS = 1e-6


def parts(rows: SwizzledRows) -> list[Tensor]:
    found = [rows.codes, rows.scales]
    return found if rows.global_scale is None else [*found, rows.global_scale]


def quantized(
    x: Tensor,
    format: ActivationFormat,
    global_scale: float | None = None,
    norm_weight: Tensor | None = None,
) -> list[Tensor]:
    """The bytes of ``cuda.quantize_rows``."""

    def op(recording: Recording, x: Tensor) -> list[Tensor]:
        return parts(
            cuda.quantize_rows(recording, x, format, norm_weight, EPS, global_scale=global_scale)
        )

    return immediately(op)(x)


def expected(
    x: Tensor, format: ActivationFormat, global_scale: float | None = None
) -> list[Tensor]:
    rows = swizzled(reference.quantize_rows(x.cpu(), format, global_scale))
    return [part.to(x.device) for part in rows if part is not None]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for name, a, b in zip(("codes", "scales", "global_scale"), found, wanted, strict=False):
        assert a.shape == b.shape, name
        different = (a.view(torch.uint8) != b.view(torch.uint8)).sum()
        is_nan = torch.zeros((), device=a.device)
        if a.dtype == torch.float32:
            is_nan = 4 * (a.isnan() & b.isnan()).sum()
            different = 4 * ((a != b) & ~(a.isnan() & b.isnan())).sum()
        assert int(different) == 0, f"{name}: {int(different)} bytes differ ({int(is_nan)} NaN)"
    assert len(found) == len(wanted)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Rows whose groups of 16 have sizes of their own."""
    random = torch.Generator("cuda").manual_seed(seed)
    rows, columns = shape
    x = torch.randn(rows, -(-columns // 16), 16, device="cuda", generator=random)
    sizes = torch.randn(rows, x.shape[1], 1, device="cuda", generator=random) * 4
    return (x * torch.exp2(sizes)).flatten(1)[:, :columns].bfloat16()


@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize(
    ("format", "global_scale"),
    [
        (ActivationFormat.FP8, None),
        (ActivationFormat.NVFP4, None),
        (ActivationFormat.NVFP4, HIDDEN),
        (ActivationFormat.NVFP4, 2.0**40),
    ],
)
def test_every_value_in_every_place(
    format: ActivationFormat, global_scale: float | None, group: int
) -> None:
    for x in rows_of_all_values(group).cuda().split(1 << 16):
        poison(32 << 20)
        assert_same(quantized(x, format, global_scale), expected(x, format, global_scale))


@pytest.mark.parametrize("columns", [8, 72, 128, 1024, 1536, 2048, 7168, 16_384, 65_536])
@pytest.mark.parametrize("rows", [1, 9, 127, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_widths_and_ragged_rows(format: ActivationFormat, rows: int, columns: int) -> None:
    x = normal(rows, columns, seed=columns + rows)
    poison(64 << 20)
    assert_same(quantized(x, format), expected(x, format))


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_what_is_no_number(format: ActivationFormat) -> None:
    x = normal(40, 512)
    x[3] = 0
    x[5, 100] = math.nan
    x[6, 300] = math.inf
    x[7, 511] = -math.inf
    x[8] = -0.0
    x[9] = 2.0**-130
    assert_same(quantized(x, format), expected(x, format))


@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_addresses_that_allow_no_vectors(format: ActivationFormat) -> None:
    wide = normal(20, 515)
    for x in (wide[:, 1:513], wide[:, :301], wide[:, :512], normal(20, 1024)[:, 512:]):
        assert_same(quantized(x, format), expected(x, format))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_others(format: ActivationFormat) -> None:
    x = normal(200, 1024)
    codes, _, *total = quantized(x, format)
    order = torch.randperm(200, device="cuda")
    turned_codes, turned_scales, *turned_total = quantized(x[order], format)
    assert torch.equal(turned_codes[:200], codes[order])
    assert_same([turned_codes, turned_scales, *turned_total], expected(x[order], format))
    for scale, turned in zip(total, turned_total, strict=True):
        assert torch.equal(turned[:200], scale[order])
    others = torch.full_like(x, math.nan)
    others[77] = x[77]
    assert torch.equal(quantized(others, format)[0][77], codes[77])
    assert torch.equal(quantized(x[77:78], format)[0][0], codes[77])


@pytest.mark.parametrize("columns", [200, 1024, 1536, 7168])
@pytest.mark.parametrize("format", FORMATS)
def test_the_norm_is_that_of_its_kernel(format: ActivationFormat, columns: int) -> None:
    x = normal(150, columns)
    weight = torch.randn(columns, device="cuda")
    normed = immediately(rms_norm)(x, weight, EPS)
    assert_same(quantized(x, format, norm_weight=weight), expected(normed, format))


@pytest.mark.parametrize(("tokens", "experts"), [(9, 8), (300, 5), (700, 256)])
@pytest.mark.parametrize("format", FORMATS)
def test_sorted_rows(format: ActivationFormat, tokens: int, experts: int) -> None:
    per_token = 4
    x = normal(tokens, 384)
    scores = torch.rand(tokens, experts, device="cuda") + torch.arange(experts, device="cuda") % 3
    ids = scores.topk(min(per_token, experts), dim=1).indices
    ids[0, 0] = -1  # no expert

    def op(recording: Recording, x: Tensor, ids: Tensor) -> list[Tensor]:
        pairs = sort_by_expert(recording, ids, experts)
        rows = cuda.quantize_sorted_rows(recording, x, pairs, format)
        return [*parts(rows), pairs.slots, pairs.tiles, pairs.tile_count]

    prepared = PreparedOp(op, x, ids)
    for part in prepared.result[:2]:
        part.fill_(0xA5)
    *found, slots, tiles, tile_count = prepared.run()
    in_use = tiles[: int(tile_count)].cpu()
    rows = rows_of_tiles(x.cpu(), slots.cpu() // ids.shape[1], in_use, format)
    wanted = [part.cuda() for part in rows if part is not None]
    assert_same([part[: len(whole)] for part, whole in zip(found, wanted, strict=True)], wanted)
    for part, whole in zip(found[:2], wanted[:2], strict=True):
        assert bool((part[len(whole) :] == 0xA5).all()), "wrote behind the last tile"


@pytest.mark.parametrize("format", FORMATS)
def test_replay_repeats_and_nothing_synchronises(format: ActivationFormat) -> None:
    x = normal(300, 1536)
    weight = torch.randn(1536, device="cuda")

    def op(recording: Recording, x: Tensor) -> list[Tensor]:
        return parts(cuda.quantize_rows(recording, x, format, weight, EPS))

    prepared = PreparedOp(op, x)
    prepared.run()
    assert_no_synchronisation(prepared.run)
    assert_replay_is_eager(prepared.run)


@pytest.mark.parametrize("format", FORMATS)
def test_a_recording_serves_fewer_tokens(format: ActivationFormat) -> None:
    x = normal(700, 512)

    def op(recording: Recording, x: Tensor) -> list[Tensor]:
        return parts(cuda.quantize_rows(recording, x, format))

    prepared = PreparedOp(op, x)
    for tokens in (700, 9, 128, 129):
        prepared.result[0].fill_(0xA5)
        found = prepared.run(tokens)
        wanted = expected(x[:tokens], format)
        assert_same([part[: len(whole)] for part, whole in zip(found, wanted, strict=True)], wanted)
        assert bool((found[0][len(wanted[0]) :] == 0xA5).all())
