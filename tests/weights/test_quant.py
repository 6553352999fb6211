"""Packing, scales and quantisers: bitwise against published vectors and against slow arithmetic
written here.
"""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4.weights.codes import e8m0_to_float, exponent_to_e8m0, pack_e2m1, unpack_e2m1
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes
from dsv4.weights.quantize import nvfp4_global_scale, quantize
from dsv4.weights.scale_swizzle import swizzle_block_scale, unswizzle_block_scale
from tests.releases import DATA

VECTORS = json.loads((DATA / "numeric_vectors.json").read_text())
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
QUANTISED = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128]


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def swizzled_offset(r: int, s: int, columns: int) -> int:
    """The published formula, one element at a time (model.md#scale-swizzle)."""
    atom = (r // 128) * math.ceil(columns / 4) + s // 4
    return atom * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + s % 4


def test_lesson07_swizzle_matches_the_published_samples() -> None:
    columns = VECTORS["swizzle_128x4"]["cols_K_over_16"]
    for place, offset in VECTORS["swizzle_128x4"]["samples"].items():
        row, column = map(int, place.split(","))
        scale = torch.zeros(256, columns, dtype=torch.uint8)
        scale[row, column] = 77
        assert swizzle_block_scale(scale).nonzero().flatten().tolist() == [offset]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (31, 3), (33, 5), (128, 4), (129, 4), (200, 9), (300, 28)]
)
def test_lesson07_swizzle_follows_the_formula_and_its_inverse_undoes_it(
    rows: int, columns: int
) -> None:
    scale = torch.randint(
        1, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows)
    )
    swizzled = swizzle_block_scale(scale)
    expected = torch.zeros_like(swizzled)
    for row in range(rows):
        for column in range(columns):
            expected[swizzled_offset(row, column, columns)] = scale[row, column]
    assert torch.equal(swizzled, expected)
    assert torch.equal(unswizzle_block_scale(swizzled, rows, columns), scale)


def test_swizzle_takes_the_bytes_of_fp8_scales() -> None:
    scale = torch.tensor([[0.5, 1.0, 448.0]]).to(torch.float8_e4m3fn)
    assert torch.equal(
        unswizzle_block_scale(swizzle_block_scale(scale), 1, 3), scale.view(torch.uint8)
    )


def test_spec11_c20_e2m1_ties_round_to_even() -> None:
    ties = {
        float(tie): value
        for tie, value in VECTORS["e2m1_rne_ties"].items()
        if not tie.startswith(">")
    }
    values = torch.tensor([*ties, *(-tie for tie in ties), 5.5, 1e30, -1e30, 0.0])
    expected = [*ties.values(), *(-value for value in ties.values()), 6.0, 6.0, -6.0, 0.0]
    assert unpack_e2m1(pack_e2m1(values)).tolist() == expected


def test_e2m1_rounds_every_float_to_the_nearest_value() -> None:
    values = torch.linspace(-7, 7, 14_002)
    found = unpack_e2m1(pack_e2m1(values))
    distance = (values[:, None] - torch.tensor(E2M1)).abs()
    assert torch.equal((values - found).abs(), distance.amin(dim=1))


def test_spec11_e35_packed_bytes_are_unsigned_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(256, 1)
    expected = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])
    assert torch.equal(unpack_e2m1(packed), expected)
    assert torch.equal(pack_e2m1(expected), packed)
    # A file stores the bytes as I8; shifting those as signed would smear the sign over the high
    # nibble.
    assert torch.equal(unpack_e2m1(packed.view(torch.int8).view(torch.uint8)), expected)


def test_mxfp4_vector_unpacks() -> None:
    vector = VECTORS["mxfp4_unpack"]
    data = torch.full((1, 16), int(vector["byte"], 16), dtype=torch.uint8)
    scale = torch.tensor([[vector["scale_byte"]]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = QuantTensor(data, scale, None, QuantFormat.MXFP4, (1, 32))
    assert weight.dequantize()[0, :2].tolist() == vector["values"]


def test_spec11_e35_e8m0_bytes_are_exponents_and_are_never_converted() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = e8m0_to_float(codes.view(torch.float8_e8m0fnu))
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255].isnan()
    assert torch.equal(exponent_to_e8m0(torch.arange(-127, 128)).view(torch.uint8), codes[:255])
    beyond = exponent_to_e8m0(torch.tensor([-128, 128])).view(torch.uint8)
    assert beyond.tolist() == [0, 254]


@pytest.mark.parametrize("amax", list(VECTORS["ue8m0_scale_exponent_fp8"]))
def test_fp8_block_scale_exponent(amax: str) -> None:
    weight = torch.zeros(128, 128)
    weight[77, 3] = -float(amax)
    scale = quantize(weight, QuantFormat.FP8_BLOCK128).block_scale
    assert scale is not None
    assert int(scale.view(torch.uint8)) - 127 == VECTORS["ue8m0_scale_exponent_fp8"][amax]


@pytest.mark.parametrize("amax", list(VECTORS["ue8m0_scale_exponent_fp4"]))
def test_mxfp4_block_scale_exponent(amax: str) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 31] = float(amax)
    scale = quantize(weight, QuantFormat.MXFP4).block_scale
    assert scale is not None
    assert int(scale.view(torch.uint8)) - 127 == VECTORS["ue8m0_scale_exponent_fp4"][amax]


def test_spec11_e35_partial_fp8_blocks_use_their_own_scale() -> None:
    data = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scale = exponent_to_e8m0(torch.tensor([[5, 4, 3], [2, 1, 0]]))
    values = QuantTensor(data, scale, None, QuantFormat.FP8_BLOCK128, (130, 257)).dequantize()
    expected = torch.tensor(
        [[2.0 ** (5 - r // 128 * 3 - c // 128) for c in range(257)] for r in range(130)]
    )
    assert torch.equal(values, expected)
    own = quantize(448 * values, QuantFormat.FP8_BLOCK128).block_scale
    assert own is not None
    assert torch.equal(e8m0_to_float(own), e8m0_to_float(scale))


def test_spec11_e37_fp8_scales_of_base_models_are_float32() -> None:
    data = torch.full((128, 128), 2.0).to(torch.float8_e4m3fn)
    weight = QuantTensor(data, torch.tensor([[0.3]]), None, QuantFormat.FP8_BLOCK128, (128, 128))
    assert weight.dequantize().unique().tolist() == [2 * torch.tensor(0.3).item()]


def test_nvfp4_value_is_code_times_block_scale_times_global_scale() -> None:
    weight = quantize(random_weight(3, 64), QuantFormat.NVFP4)
    assert weight.block_scale is not None
    assert weight.global_scale is not None
    values = weight.dequantize()
    for row in range(3):
        for column in range(64):
            byte = int(weight.data[row, column // 2])
            code = E2M1[byte >> 4 if column % 2 else byte & 15]
            expected = (
                torch.tensor(code)
                * weight.block_scale[row, column // 16].float()
                * weight.global_scale
            )
            assert values[row, column] == expected


def test_nvfp4_recipe_is_amax_over_6_times_448() -> None:
    weight = random_weight(4, 32)
    quantised = quantize(weight, QuantFormat.NVFP4)
    assert quantised.global_scale is not None
    assert quantised.block_scale is not None
    assert torch.equal(quantised.global_scale, weight.abs().max() / 2688)
    blocks = weight.unflatten(-1, (2, 16)).abs().amax(-1)
    expected = (blocks / (6 * quantised.global_scale)).to(torch.float8_e4m3fn)
    assert torch.equal(quantised.block_scale.float(), expected.float())


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("shape", [(1, 32), (3, 160), (130, 288), (2, 3, 64)])
def test_lesson11_quantise_then_dequantise_stays_within_half_a_step(
    format: QuantFormat, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    quantised = quantize(weight, format)
    error = (quantised.dequantize() - weight).abs()
    group = {QuantFormat.NVFP4: 16, QuantFormat.MXFP4: 32}.get(format, shape[-1])
    amax = (
        weight.unflatten(-1, (-1, group))
        .abs()
        .amax(-1, keepdim=True)
        .expand(*shape[:-1], -1, group)
        .flatten(-2)
    )
    # Half of the widest E2M1 step is 1/6 of the range, the scale is at most doubled (MXFP4) or 1/16
    # off (NVFP4); E4M3 has 3 fraction bits.
    bounds = {QuantFormat.NVFP4: amax * (1 / 6 + 1 / 15), QuantFormat.MXFP4: amax / 3}
    bound = bounds.get(format, weight.abs() / 16 + 1e-3)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("format", QUANTISED)
def test_quantising_a_stack_equals_quantising_its_matrices(format: QuantFormat) -> None:
    weight = (
        torch.randn(3, 130, 96, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    )
    stack = quantize(weight, format)
    for index in range(3):
        assert torch.equal(stack[index].dequantize(), quantize(weight[index], format).dequantize())


def test_shared_global_scale_keeps_both_halves_in_range() -> None:
    small = random_weight(2, 32, 1)
    large = 100 * random_weight(2, 32, 2)
    shared = nvfp4_global_scale(large)
    pair = [quantize(weight, QuantFormat.NVFP4, shared) for weight in (small, large)]
    assert all(weight.global_scale is shared for weight in pair)
    assert bool(torch.isfinite(pair[0].dequantize()).all())


def test_lesson10_shapes_that_contradict_the_format_are_refused() -> None:
    good = quantize(random_weight(4, 64), QuantFormat.NVFP4)
    with pytest.raises(
        ValueError, match=r"data: found torch.uint8 \(4, 16\), expected torch.uint8 \(4, 32\)"
    ):
        QuantTensor(
            good.data[:, :16], good.block_scale, good.global_scale, QuantFormat.NVFP4, (4, 64)
        )
    with pytest.raises(ValueError, match="expected a multiple of 16"):
        packed_shapes(QuantFormat.NVFP4, (4, 24))


def test_what_is_no_dense_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight: found torch.float16, expected torch.bfloat16"):
        QuantTensor.dense(random_weight(4, 64).half())
    with pytest.raises(ValueError, match=r"shape: found \(64,\), expected at least two dimensions"):
        QuantTensor.dense(random_weight(1, 64)[0])


@pytest.mark.parametrize("missing", ["block_scale", "global_scale"])
def test_lesson12_a_missing_scale_is_refused(missing: str) -> None:
    good = quantize(random_weight(4, 64), QuantFormat.NVFP4)
    parts = {"block_scale": good.block_scale, "global_scale": good.global_scale, missing: None}
    with pytest.raises(ValueError, match=f"{missing}: missing"):
        QuantTensor(
            good.data, parts["block_scale"], parts["global_scale"], QuantFormat.NVFP4, (4, 64)
        )


def test_lesson12_a_scale_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="block_scale: not part of this format"):
        QuantTensor(
            torch.zeros(4, 64, dtype=torch.bfloat16),
            torch.ones(4, 4),
            None,
            QuantFormat.BF16,
            (4, 64),
        )


def test_spec11_e35_a_scale_of_the_wrong_dtype_is_refused() -> None:
    good = quantize(random_weight(4, 64), QuantFormat.MXFP4)
    assert good.block_scale is not None
    with pytest.raises(ValueError, match="block_scale: found torch.uint8"):
        QuantTensor(good.data, good.block_scale.view(torch.uint8), None, QuantFormat.MXFP4, (4, 64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("format", list(QuantFormat))
def test_values_that_are_not_finite_are_refused(format: QuantFormat, value: float) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 5] = value
    with pytest.raises(ValueError, match="found NaN or infinity"):
        quantize(weight, format)


@pytest.mark.parametrize("format", QUANTISED)
def test_all_zero_weights_stay_zero(format: QuantFormat) -> None:
    weight = quantize(torch.zeros(2, 128), format)
    assert torch.equal(weight.dequantize(), torch.zeros(2, 128))
    assert not weight.data.view(torch.uint8).any()


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32), st.sampled_from(QUANTISED)
)
def test_quantising_is_odd_and_finite(values: list[float], format: QuantFormat) -> None:
    weight = torch.tensor([values])
    positive = quantize(weight, format).dequantize()
    negative = quantize(-weight, format).dequantize()
    assert bool(torch.isfinite(positive).all())
    assert torch.equal(positive, -negative)


def test_every_part_goes_to_another_device() -> None:
    weight = quantize(torch.ones(2, 32), QuantFormat.NVFP4).to("meta")
    parts = (weight.data, weight.block_scale, weight.global_scale)
    assert [part is not None and part.is_meta for part in parts] == [True] * 3
