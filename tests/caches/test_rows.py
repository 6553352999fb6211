"""Cached key rows: byte layouts, scales, masked writes."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import (
    KV_GROUP,
    RowCache,
    RowFormat,
    pack_index_rows,
    pack_kv_rows,
    row_shapes,
    unpack_index_rows,
    unpack_kv_rows,
)

VECTORS = json.loads(
    (Path(__file__).parent.parent / "data/numeric_vectors.json").read_text(encoding="utf-8")
)
CPU = torch.device("cpu")
HEAD_DIM = 512
ROPE_DIM = 64
FORMATS = list(RowFormat)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def allocate(
    format: RowFormat, slots: int = 6, plain_dtype: torch.dtype = torch.bfloat16
) -> RowCache:
    width = 128 if format is RowFormat.INDEX_FP8 else HEAD_DIM
    return RowCache.allocate(slots, width, ROPE_DIM, format, plain_dtype, CPU)


def raw_bytes(cache: RowCache) -> list[Tensor]:
    return [
        part.clone().view(torch.uint8)
        for part in (cache.data, cache.block_scale)
        if part is not None
    ]


def exact_exponent(amax: float) -> int:
    """⌈log2(max(amax, 1e-4) / 448)⌉ by comparison with powers of two."""
    exponent = -40
    while 2.0**exponent < max(amax, 1e-4) / 448:
        exponent += 1
    return exponent


def exact_e4m3(value: float) -> float:
    """Nearest e4m3 value, ties to the even code, saturating at 448."""
    magnitude = min(abs(value), 448.0)
    if magnitude < 2**-6:
        step = 2.0**-9
    else:
        step = 2.0 ** (math.floor(math.log2(magnitude)) - 3)
    return math.copysign(round(magnitude / step) * step, value)


def test_a_key_row_has_584_bytes_and_an_index_row_132() -> None:
    key = allocate(RowFormat.KV_FP8, slots=1)
    index = allocate(RowFormat.INDEX_FP8, slots=1)
    assert key.block_scale is not None
    assert index.block_scale is not None
    assert (key.data.nbytes, key.block_scale.nbytes, key.nbytes) == (576, 8, 584)
    assert (index.data.nbytes, index.block_scale.nbytes, index.nbytes) == (128, 4, 132)
    assert allocate(RowFormat.PLAIN, slots=3).nbytes == 3 * 1024


@pytest.mark.parametrize(
    ("width", "rope", "data", "scales"),
    [(512, 64, 576, 8), (128, 64, 192, 8), (1280, 64, 1344, 24)],
)
def test_shapes_of_other_widths(width: int, rope: int, data: int, scales: int) -> None:
    shapes = row_shapes(width, rope, RowFormat.KV_FP8, torch.bfloat16)
    assert shapes == ((data, torch.uint8), (scales, torch.uint8))
    packed = pack_kv_rows(normal(2, width, seed=1), rope)
    assert [part.shape[1] for part in packed] == [data, scales]


@pytest.mark.parametrize(("amax", "exponent"), VECTORS["ue8m0_scale_exponent_fp8"].items())
def test_published_scale_exponents(amax: str, exponent: int) -> None:
    row = torch.zeros(HEAD_DIM)
    row[5] = -float(amax)
    _, block_scale = pack_kv_rows(row, ROPE_DIM)
    assert int(block_scale[0]) - 127 == exponent
    assert block_scale[1:7].tolist() == [127 - 22] * 6
    assert int(block_scale[7]) == 0, "the pad byte is zero"


def test_key_rows_equal_the_formula() -> None:
    """Group by group: e4m3 of value / 2^e, 2^e the smallest power of two with amax / 2^e ≤ 448."""
    rows = normal(3, HEAD_DIM, seed=2) * torch.logspace(-6, 4, HEAD_DIM)
    data, block_scale = pack_kv_rows(rows, ROPE_DIM)
    found = unpack_kv_rows(data, block_scale, ROPE_DIM)
    for row, scales, values in zip(rows, block_scale, found, strict=True):
        for group in range(7):
            part = slice(KV_GROUP * group, KV_GROUP * (group + 1))
            exponent = exact_exponent(float(row[part].abs().max()))
            assert int(scales[group]) == exponent + 127
            exact = [
                exact_e4m3(value / 2.0**exponent) * 2.0**exponent for value in row[part].tolist()
            ]
            assert values[part].tolist() == exact
    assert torch.equal(found[:, -ROPE_DIM:], rows[:, -ROPE_DIM:].bfloat16().float()), (
        "rotary values stay bfloat16"
    )


def test_key_row_layout_is_448_codes_then_64_bfloat16() -> None:
    rows = normal(2, HEAD_DIM, seed=3)
    data, _ = pack_kv_rows(rows, ROPE_DIM)
    assert torch.equal(data[:, 448:].contiguous().view(torch.bfloat16), rows[:, 448:].bfloat16())
    one = torch.zeros(HEAD_DIM)
    one[3] = 448.0
    one[70] = 448.0
    codes, scale = pack_kv_rows(one, ROPE_DIM)
    assert (int(codes[3]), int(codes[70]), int(codes[0])) == (0x7E, 0x7E, 0), (
        "0x7E is 448, the largest e4m3 value"
    )
    assert scale.tolist() == [127, 127, 105, 105, 105, 105, 105, 0]


def test_index_rows_equal_the_formula() -> None:
    rows = normal(4, 128, seed=4) * torch.tensor([1e-12, 1.0, 1e5, 3e30])[:, None]
    data, scale = pack_index_rows(rows)
    assert (data.dtype, scale.dtype, scale.shape) == (torch.uint8, torch.float32, (4, 1))
    found = unpack_index_rows(data, scale)
    for row, row_scale, values in zip(rows, scale[:, 0].tolist(), found, strict=True):
        assert row_scale == pytest.approx(float(row.abs().max()) / 448, rel=1e-6)
        codes = torch.tensor([exact_e4m3(value) for value in (row / row_scale).tolist()])
        assert torch.equal(values, codes * row_scale)


def test_zero_rows_are_zero() -> None:
    data, scale = pack_index_rows(torch.zeros(2, 128))
    assert scale.tolist() == [[1.0], [1.0]]
    assert not unpack_index_rows(data, scale).any()
    assert not unpack_kv_rows(*pack_kv_rows(torch.zeros(2, HEAD_DIM), ROPE_DIM), ROPE_DIM).any()


@pytest.mark.parametrize("exponent", range(-30, 31))
def test_packing_twice_changes_nothing(exponent: int) -> None:
    """The values a cache returns are exactly representable in it, at any magnitude."""
    rows = normal(3, HEAD_DIM, seed=exponent + 100, scale=2.0**exponent)
    values = unpack_kv_rows(*pack_kv_rows(rows, ROPE_DIM), ROPE_DIM)
    assert torch.equal(unpack_kv_rows(*pack_kv_rows(values, ROPE_DIM), ROPE_DIM), values)
    for part in (slice(0, 448), slice(448, 512)):
        bound = max(float(rows[:, part].abs().max()) * 2**-4, 2**-32)
        assert float((values - rows)[:, part].abs().max()) <= bound


def test_index_rows_survive_packing_twice() -> None:
    rows = normal(50, 128, seed=5)
    values = unpack_index_rows(*pack_index_rows(rows))
    again = unpack_index_rows(*pack_index_rows(values))
    torch.testing.assert_close(again, values, rtol=2**-22, atol=0)
    assert float((values - rows).abs().max()) <= float(rows.abs().max()) * 2**-4


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_write_then_read_gives_the_round_trip(format: RowFormat) -> None:
    cache = allocate(format)
    slots = torch.tensor([4, 0, 5])
    rows = normal(3, cache.width, seed=6)
    cache.write(slots, rows)
    expected = {
        RowFormat.KV_FP8: lambda: unpack_kv_rows(*pack_kv_rows(rows, ROPE_DIM), ROPE_DIM),
        RowFormat.INDEX_FP8: lambda: unpack_index_rows(*pack_index_rows(rows)),
        RowFormat.PLAIN: lambda: rows.bfloat16().float(),
    }[format]()
    assert torch.equal(cache.read(slots), expected)
    assert torch.equal(cache.read_all()[slots], expected)
    assert cache.read_all().dtype == torch.float32
    assert not cache.read(torch.tensor([1, 2, 3])).any(), (
        "slots that were not written keep their zeros"
    )
    assert torch.equal(cache.read(slots[None, :].expand(2, -1)), expected.expand(2, -1, -1))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_masked_rows_keep_their_bytes(format: RowFormat) -> None:
    """Also bytes that mean NaN, and also when the new row is NaN."""
    cache = allocate(format)
    for part in (cache.data, cache.block_scale):
        if part is not None:
            part.view(torch.uint8).fill_(0x7F)
    before = raw_bytes(cache)
    rows = normal(3, cache.width, seed=7)
    rows[0] = torch.nan
    cache.write(torch.tensor([1, 3, 5]), rows, where=torch.tensor([False, True, False]))
    for old, new in zip(before, raw_bytes(cache), strict=True):
        kept = [slot for slot in range(6) if slot != 3]
        assert torch.equal(new[kept], old[kept])
        assert not torch.equal(new[3], old[3])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_writing_nothing(format: RowFormat) -> None:
    cache = allocate(format)
    before = raw_bytes(cache)
    cache.write(torch.empty(0, dtype=torch.int64), torch.empty(0, cache.width))
    assert all(torch.equal(*pair) for pair in zip(raw_bytes(cache), before, strict=True))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_nan_is_not_hidden_by_the_cache(format: RowFormat) -> None:
    """A NaN key must show in the logits, where it is reported, and not turn into a number."""
    cache = allocate(format)
    rows = normal(2, 512, seed=8)
    rows = rows[:, : cache.width].clone()
    rows[0, 5] = torch.nan
    cache.write(torch.tensor([0, 1]), rows)
    found = cache.read_all()
    assert bool(found[0].isnan().any())
    assert not found[1].isnan().any()


def test_a_row_alone_of_odd_width_is_read() -> None:
    """Its rotary values begin at an odd byte; those of several rows are copied anyway."""
    rows = torch.randn(2, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    both = unpack_kv_rows(*pack_kv_rows(rows, 8), 8)
    assert torch.equal(both[:, 25:], rows[:, 25:].float())
    assert torch.equal(unpack_kv_rows(*pack_kv_rows(rows[:1], 8), 8), both[:1])


def test_plain_rows_are_stored_in_the_given_dtype() -> None:
    rows = normal(2, HEAD_DIM, seed=9)
    for dtype in (torch.bfloat16, torch.float32):
        cache = allocate(RowFormat.PLAIN, plain_dtype=dtype)
        cache.write(torch.tensor([0, 1]), rows)
        assert cache.data.dtype == dtype
        assert cache.block_scale is None
        assert torch.equal(cache.read(torch.tensor([0, 1])), rows.to(dtype).float())


def test_index_rows_of_16_bits_are_packed_as_those_of_32() -> None:
    rows = normal(5, 128, seed=9).bfloat16()
    found, expected = pack_index_rows(rows), pack_index_rows(rows.float())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_the_first_slots_have_their_scales(format: RowFormat) -> None:
    cache = allocate(format)
    first = cache.first(4)
    assert (first.slots, first.nbytes * 6) == (4, cache.nbytes * 4)
