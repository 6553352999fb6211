"""pack_weight: every stored byte comes back, and elements lie where the documentation says."""

from dataclasses import replace
from math import inf, prod

import pytest
import torch
from torch import Tensor

from dsv4.weights.codes import e8m0_to_float
from dsv4.weights.packed import PackedWeight, chunk_columns, pack_weight, padded
from dsv4.weights.quant import QuantFormat, QuantTensor, ValuesLost
from dsv4.weights.quantize import quantize

FORMATS = [format for format in QuantFormat if format is not QuantFormat.F32]
SHAPES = [
    (16, 64),
    (64, 64),
    (8, 32),
    (48, 96),
    (160, 192),
    (3, 20, 160),
    (2, 3, 64, 128),
    (129, 320),
]


def stored(format: QuantFormat, shape: tuple[int, ...]) -> QuantTensor:
    """Random bytes as codes and scales: every code occurs, negative zero included, but no NaN."""
    generator = torch.Generator().manual_seed(prod(shape))
    weight = quantize(torch.randn(shape, generator=generator), format)
    if format in (QuantFormat.NVFP4, QuantFormat.MXFP4):
        data = torch.randint(0, 256, weight.data.shape, generator=generator, dtype=torch.uint8)
        weight = QuantTensor(data, weight.block_scale, weight.global_scale, format, shape)
    return weight


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    bytes_a, bytes_b = (part.reshape(-1).view(torch.uint8) for part in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_a, bytes_b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_unpack_is_the_inverse(format: QuantFormat, shape: tuple[int, ...]) -> None:
    weight = stored(format, shape)
    packed = pack_weight(weight)
    unpacked = packed.unpack()
    assert unpacked.shape == packed.shape == shape
    assert same_bytes(unpacked.data, weight.data)
    assert same_bytes(unpacked.global_scale, weight.global_scale)
    if format is QuantFormat.FP8_BLOCK128:
        assert weight.block_scale is not None
        assert same_bytes(unpacked.block_scale, e8m0_to_float(weight.block_scale))
    else:
        assert same_bytes(unpacked.block_scale, weight.block_scale)
    assert same_bytes(packed.dequantize(), weight.dequantize())


def element(packed: PackedWeight, row: int, column: int) -> float:
    """One value read at the position that the layout's description gives."""
    columns = chunk_columns(packed.format)
    tile, row = divmod(row, 16)
    chunk, column = divmod(column, columns)
    step, column = divmod(column, 16)
    register = row // 8 + 2 * (column // 8)
    half = column % 2
    group = row % 8
    lane = 4 * (row % 8) + column % 8 // 2
    lane_bytes = packed.data[tile, chunk, lane]
    if packed.format is QuantFormat.BF16:
        return float(lane_bytes.view(torch.bfloat16)[2 * register + half])
    scale = packed.block_scale
    assert scale is not None
    if packed.format is QuantFormat.FP8_BLOCK128:
        code = lane_bytes.view(torch.float8_e4m3fn)[8 * step + 2 * register + half]
        return float(code) * float(scale[tile // 8, chunk // 4])
    # The f16 of the documented shifts is the value times 2^-14.
    word = (int(lane_bytes.view(torch.int32)[step]) >> (16 * half)) & 0xFFFF
    magnitude = word << (0, 3, 6, 9)[register]
    sign = word << (0, 3, 1, 2)[register]
    bits = torch.tensor((magnitude & 0x0E00) | (sign & 0x8000), dtype=torch.int32).to(torch.uint16)
    value = float(bits.view(torch.float16)) * 2.0**14
    if packed.format is QuantFormat.MXFP4:
        code = scale[tile, chunk, group, 2 * (step // 2) + row // 8]
        return value * float(e8m0_to_float(code.view(torch.float8_e8m0fnu)))
    assert packed.global_scale is not None
    code = scale[tile, chunk, group, 2 * step + row // 8]
    return float((value * code.view(torch.float8_e4m3fn).float()) * packed.global_scale)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_elements_lie_where_the_kernels_read_them(format: QuantFormat) -> None:
    weight = stored(format, (160, 192))
    packed = pack_weight(weight)
    values = weight.dequantize()
    for index in range(0, 160 * 192, 37):
        row, column = divmod(index, 192)
        assert element(packed, row, column) == float(values[row, column]), (row, column)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_padding_is_zero(format: QuantFormat) -> None:
    packed = pack_weight(stored(format, (24, 96)))
    whole = PackedWeight(
        packed.data, packed.block_scale, packed.global_scale, format, (padded(24), padded(96))
    )
    values = whole.dequantize()
    assert not values[24:].any()
    assert not values[:, 96:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_without_memory_the_shapes_are_the_same(
    format: QuantFormat, shape: tuple[int, ...]
) -> None:
    weight = stored(format, shape)
    packed = pack_weight(weight)
    meta = pack_weight(weight.to("meta"))
    assert (meta.format, meta.shape, meta.nbytes) == (packed.format, packed.shape, packed.nbytes)
    for part, expected in ((meta.data, packed.data), (meta.block_scale, packed.block_scale)):
        if expected is None:
            assert part is None
        else:
            assert part is not None
            assert part.is_meta
            assert (part.shape, part.stride()) == (expected.shape, expected.stride())


def test_a_stack_without_memory_is_packed_at_once() -> None:
    """Not expert by expert: a plan packs thousands of them."""
    packed = pack_weight(
        QuantTensor.dense(torch.empty(1 << 20, 64, 64, dtype=torch.bfloat16, device="meta"))
    )
    assert packed.data.shape == (1 << 20, 4, 4, 32, 16)
    assert (
        pack_weight(QuantTensor.dense(torch.empty(16, 64, device="meta"))).format
        is QuantFormat.BF16
    )


def test_stack_member_shares_memory() -> None:
    packed = pack_weight(stored(QuantFormat.NVFP4, (3, 32, 64)))
    member = packed[1]
    assert member.shape == (32, 64)
    assert member.data.data_ptr() == packed.data[1].data_ptr()
    assert torch.equal(member.dequantize(), packed.dequantize()[1])
    with pytest.raises(ValueError, match="one matrix"):
        member[0]


def test_float32_weights_are_packed_only_if_bfloat16_holds_them() -> None:
    exact = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    packed = pack_weight(QuantTensor.dense(exact))
    assert packed.format is QuantFormat.BF16
    assert torch.equal(packed.dequantize(), exact)
    with pytest.raises(ValuesLost, match="^weight: found an F32 weight"):
        pack_weight(QuantTensor.dense(exact + 2.0**-30))


def test_wrong_parts_are_refused() -> None:
    packed = pack_weight(stored(QuantFormat.FP8_BLOCK128, (32, 64)))
    with pytest.raises(ValueError, match="^format: found f32, expected one of"):
        replace(packed, format=QuantFormat.F32)
    with pytest.raises(ValueError, match="^block_scale: missing"):
        PackedWeight(packed.data, None, None, packed.format, packed.shape)
    with pytest.raises(ValueError, match="^data: found"):
        PackedWeight(packed.data, packed.block_scale, None, packed.format, (80, 64))
    with pytest.raises(ValueError, match=r"^block_scale: found torch.float64 \(1, 1\), expected"):
        replace(packed, block_scale=torch.ones(1, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="^global_scale: not part of this format"):
        replace(packed, global_scale=torch.ones(()))


def test_packing_notes_whether_fp8_scales_are_powers_of_two() -> None:
    """By their type where they are stored as exponents, else by their values; not on meta."""
    weight = quantize(torch.randn(2, 130, 256), QuantFormat.FP8_BLOCK128)
    assert weight.block_scale is not None
    assert weight.block_scale.dtype == torch.float8_e8m0fnu
    packed = pack_weight(weight)
    assert packed.power_of_two_scales
    assert packed[1].power_of_two_scales
    for value, expected in ((0.25, True), (0.0, True), (0.75, False), (-1.0, False), (inf, False)):
        scale = torch.ones(weight.block_scale.shape)
        scale[1, 1, 0] = value
        floats = replace(weight, block_scale=scale)
        assert pack_weight(floats).power_of_two_scales == expected, value
        assert not pack_weight(
            replace(floats, data=floats.data.to("meta"), block_scale=scale.to("meta"))
        ).power_of_two_scales
    assert not pack_weight(quantize(torch.randn(64, 64), QuantFormat.MXFP4)).power_of_two_scales
