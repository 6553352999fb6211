"""NativeWeight: exactly the values of the stored weight, where the tensor cores look for them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4.weights.native import (
    NATIVE_GROUP,
    NativeGateUp,
    NativeWeight,
    is_disguised_mxfp4,
    native_bytes,
    native_weight,
    unsupported_reason,
)
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes, planned_quant_tensor

FP8, MXFP4, NVFP4 = QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4
MULTIPLES = {FP8: 32, MXFP4: 128, NVFP4: 32}
# A form in a checkpoint, and the native one.
FORMS = ((FP8, FP8), (MXFP4, MXFP4), (NVFP4, NVFP4), (NVFP4, MXFP4))
SHAPES = st.tuples(
    st.sampled_from([(), (1,), (3,), (2, 2)]), st.integers(1, 300), st.integers(1, 5)
)


def random_bytes(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def stored(format: QuantFormat, shape: tuple[int, ...], disguised: bool = False) -> QuantTensor:
    """Random codes and scales without NaN; ``disguised``: NVFP4 that is MXFP4."""
    parts = packed_shapes(format, shape)
    data_shape, scale_shape = parts["data"], parts["block_scale"]
    assert data_shape is not None
    assert scale_shape is not None
    data = random_bytes(data_shape, 0)
    scale = random_bytes(scale_shape, 1) % 255
    if format is FP8:
        data = torch.where(data & 0x7F == 0x7F, 0x38, data).to(torch.uint8)
        return QuantTensor(
            data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), None, format, shape
        )
    if format is MXFP4:
        return QuantTensor(data, scale.view(torch.float8_e8m0fnu), None, format, shape)
    values = (scale % 0x7F).view(torch.float8_e4m3fn)
    if disguised:
        # Zero and the 18 powers of two that E4M3 has.
        exponents = (scale[..., ::2] % 19).repeat_interleave(2, -1).float()
        values = torch.where(exponents == 0, 0.0, torch.exp2(exponents - 10))
        values = values.to(torch.float8_e4m3fn)
    total = torch.rand(shape[:-2], generator=torch.Generator().manual_seed(2)) + 0.01
    return QuantTensor(data, values, total, format, shape)


def same_parts(a: NativeWeight | NativeGateUp, b: NativeWeight | NativeGateUp) -> bool:
    pairs = ((a.data, b.data), (a.block_scale, b.block_scale), (a.global_scale, b.global_scale))
    return (a.format, a.shape) == (b.format, b.shape) and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(("format", "native"), FORMS, ids=lambda format: format.value)
@given(SHAPES)
def test_a_copy_has_the_values_of_its_weight_and_is_that_of_its_stored_form(
    format: QuantFormat, native: QuantFormat, sizes: tuple[tuple[int, ...], int, int]
) -> None:
    stack, rows, blocks = sizes
    shape = (*stack, rows, MULTIPLES[native] * blocks)
    weight = stored(format, shape, disguised=format is not native)
    copy = native_weight(weight, native)
    assert copy.nbytes == native_bytes(native, shape)
    assert torch.equal(copy.dequantize(), weight.dequantize())
    again = copy.stored()
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert same_parts(native_weight(again, native), copy)


@pytest.mark.parametrize(("format", "native"), FORMS, ids=lambda format: format.value)
@given(SHAPES)
def test_gate_and_up_come_apart_as_they_were(
    format: QuantFormat, native: QuantFormat, sizes: tuple[tuple[int, ...], int, int]
) -> None:
    stack, rows, blocks = sizes
    shape = (*stack, 128 * (1 + rows // 128), MULTIPLES[native] * blocks)
    w1 = native_weight(stored(format, shape, disguised=format is not native), native)
    w3 = NativeWeight(w1.data ^ 0x11, w1.block_scale ^ 1, w1.global_scale * 2, native, shape)
    joined = NativeGateUp.of(w1, w3)
    assert joined.nbytes == w1.nbytes + w3.nbytes
    first, second = joined.split()
    assert same_parts(first, w1)
    assert same_parts(second, w3)


@pytest.mark.parametrize("format", [FP8, MXFP4, NVFP4], ids=lambda format: format.value)
def test_elements_lie_where_the_tensor_cores_look_for_them(format: QuantFormat) -> None:
    rows, columns, group = 200, 384, NATIVE_GROUP[format]
    weight = stored(format, (2, rows, columns))
    copy, values = native_weight(weight, format), weight.dequantize()
    assert copy.data.shape[-1] * (1 if format is FP8 else 2) == columns
    atoms = -(-(columns // group) // 4)
    for row, column in ((0, 0), (1, 33), (31, 127), (32, 128), (127, 255), (128, 17), (199, 383)):
        s = column // group
        place = (row // 128 * atoms + s // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + s % 4
        byte = copy.block_scale[1, place]
        scale = (
            float(byte.view(torch.float8_e4m3fn)) if format is NVFP4 else 2.0 ** (int(byte) - 127)
        )
        if format is FP8:
            code = float(copy.data[1, row, column].view(torch.float8_e4m3fn))
        else:
            nibble = int(copy.data[1, row, column // 2]) >> column % 2 * 4 & 15
            code = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[nibble & 7] * (-1 if nibble & 8 else 1)
        expected = torch.tensor(code * scale) * copy.global_scale[1]
        assert torch.equal(values[1, row, column], expected)


def test_gate_and_up_alternate_by_128_rows() -> None:
    w1, w3 = (native_weight(stored(NVFP4, (2, 256, 64)), NVFP4) for _ in range(2))
    w3 = NativeWeight(w3.data ^ 0xFF, w3.block_scale ^ 0xFF, w3.global_scale, NVFP4, w3.shape)
    joined = NativeGateUp.of(w1, w3)
    assert torch.equal(joined.data[1, 128:256], w3.data[1, :128])
    assert torch.equal(joined.data[1, 256:384], w1.data[1, 128:])
    assert torch.equal(joined.block_scale[1, 512:1024], w3.block_scale[1, :512])
    assert torch.equal(joined[1].data, joined.data[1])


def test_a_disguise_is_found_and_nothing_else_is() -> None:
    weight = stored(NVFP4, (3, 32), disguised=True)
    assert weight.block_scale is not None
    assert is_disguised_mxfp4(weight)
    codes = weight.block_scale.view(torch.uint8)
    for place, code in (((1, 0), 0x3C), ((2, 1), 0x30), ((0, 0), 0xB8)):
        changed = codes.clone()
        changed[place] = code
        if code == 0xB8:
            changed[0, 1] = code
        scale = changed.view(torch.float8_e4m3fn)
        other = QuantTensor(weight.data, scale, weight.global_scale, NVFP4, weight.shape)
        assert not is_disguised_mxfp4(other), hex(code)
    assert not is_disguised_mxfp4(stored(MXFP4, (3, 32)))
    assert not is_disguised_mxfp4(stored(NVFP4, (3, 48), disguised=False))


@pytest.mark.parametrize("scale", [1.5, 0.0, -2.0, 2.0**-128, 3 * 2.0**-128, torch.inf, torch.nan])
def test_float32_scales_that_are_no_powers_of_two_are_refused(scale: float) -> None:
    scales = torch.tensor([[2.0**-127, 2.0**127], [1.0, scale]])
    data = torch.zeros((200, 256), dtype=torch.float8_e4m3fn)
    weight = QuantTensor(data, scales, None, FP8, (200, 256))
    assert unsupported_reason(weight, FP8) == (
        "FP8 block scales are not all powers of two from 2^-127 to 2^127"
    )
    with pytest.raises(ValueError, match=r"^weight: FP8 block scales are not all powers of two"):
        native_weight(weight, FP8)


def test_float32_scales_that_are_powers_of_two_are_taken() -> None:
    scales = torch.tensor([[2.0**-127, 2.0**127], [1.0, 2.0**-126]])
    data = random_bytes((200, 256), 3) & 0x77
    weight = QuantTensor(data.view(torch.float8_e4m3fn), scales, None, FP8, (200, 256))
    assert torch.equal(native_weight(weight, FP8).dequantize(), weight.dequantize())


def test_every_refusal_says_why() -> None:
    dense = QuantTensor.dense(torch.zeros(2, 128))
    assert unsupported_reason(dense, FP8) == "f32 weights have no native form as fp8_block128"
    wide = stored(NVFP4, (2, 96))
    assert unsupported_reason(wide, MXFP4) == "K = 96 is no multiple of 128, as mxfp4 needs"
    for format in (FP8, NVFP4):
        odd = planned_quant_tensor(format, (2, 48))
        expected = f"K = 48 is no multiple of 32, as {format.value} needs"
        assert unsupported_reason(odd, format) == expected
    plain = stored(NVFP4, (2, 128))
    assert unsupported_reason(plain, MXFP4) == "NVFP4 scales are not powers of two in equal pairs"
    assert unsupported_reason(plain, NVFP4) is None


@pytest.mark.parametrize(("format", "native"), FORMS, ids=lambda format: format.value)
def test_planned_copies_have_the_shapes_of_real_ones(
    format: QuantFormat, native: QuantFormat
) -> None:
    shape = (2, 128, 256)
    real = native_weight(stored(format, shape, disguised=format is not native), native)
    planned = native_weight(planned_quant_tensor(format, shape), native)
    both = NativeGateUp.of(planned, planned), NativeGateUp.of(real, real)
    for made, expected in ((planned, real), both):
        assert made.data.is_meta
        assert made.data.shape == expected.data.shape
        assert made.block_scale.shape == expected.block_scale.shape
        assert made.nbytes == expected.nbytes


def test_parts_that_do_not_match_are_refused() -> None:
    weight = native_weight(stored(MXFP4, (128, 128)), MXFP4)
    with pytest.raises(ValueError, match=r"^data: found torch.uint8 \(128, 64\), expected"):
        NativeWeight(weight.data, weight.block_scale, weight.global_scale, FP8, weight.shape)
    with pytest.raises(ValueError, match=r"^global_scale: found torch.float32 \(1,\), expected"):
        NativeWeight(weight.data, weight.block_scale, torch.ones(1), MXFP4, weight.shape)
    narrow = native_weight(stored(MXFP4, (192, 128)), MXFP4)
    with pytest.raises(ValueError, match="^w3: found mxfp4"):
        NativeGateUp.of(weight, narrow)
    with pytest.raises(ValueError, match="^w3: found fp8_block128 .*, expected mxfp4"):
        NativeGateUp.of(weight, native_weight(stored(FP8, (128, 128)), FP8))
    with pytest.raises(ValueError, match=r"^global_scale: found .* \(1,\), expected"):
        replace(NativeGateUp.of(weight, weight), global_scale=torch.ones(1))
    with pytest.raises(ValueError, match="^w1: found 192 rows, expected a multiple of 128"):
        NativeGateUp.of(narrow, narrow)
    with pytest.raises(ValueError, match="is one matrix, not a stack"):
        weight[0]
