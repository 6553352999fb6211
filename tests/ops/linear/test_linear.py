"""linear and grouped_linear: float32 accumulation of the dequantised weight, one rounding, shapes
checked.
"""

import pytest
import torch

from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.cases import EPS, OpsUnderTest, assert_rounded_once, integers, normal

FORMATS = list(QuantFormat)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5])
def test_linear_is_x_times_the_dequantised_weight(
    ops: OpsUnderTest, format: QuantFormat, dtype: torch.dtype, tokens: int
) -> None:
    weight = quantize(normal(160, 192, seed=1, scale=0.1), format)
    x = normal(tokens, 192, seed=2, dtype=dtype)
    y = ops.linear(x, ops.pack_weight(weight))
    assert y.dtype == dtype
    assert y.shape == (tokens, 160)
    assert_rounded_once(y, x.double() @ weight.dequantize().double().T)


def test_out_dtype_keeps_the_float32_sum(ops: OpsUnderTest) -> None:
    weight = quantize(normal(32, 256, seed=3), QuantFormat.BF16)
    x = normal(4, 256, seed=4, dtype=torch.bfloat16)
    y = ops.linear(x, ops.pack_weight(weight), torch.float32)
    assert y.dtype == torch.float32
    assert_rounded_once(y, x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_in_front_of_a_list_is_rounded_before_the_products(
    ops: OpsUnderTest, dtype: torch.dtype
) -> None:
    weights = [quantize(normal(48, 256, seed=seed), QuantFormat.BF16) for seed in (15, 16)]
    x = normal(3, 256, seed=17, dtype=dtype)
    norm_weight = normal(256, seed=18)
    rows = ops.pack_rows(weights, (None, torch.float32))
    found = ops.linear_rows(x, rows, norm_weight, EPS)
    assert [y.dtype for y in found] == [dtype, torch.float32]
    scale = (x.double().square().mean(-1, keepdim=True) + EPS) ** -0.5
    normed = (x.double() * scale * norm_weight.double()).to(dtype).double()
    for y, weight in zip(found, weights, strict=True):
        assert_rounded_once(y, normed @ weight.dequantize().double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear_multiplies_each_group_by_its_own_rows(
    ops: OpsUnderTest, dtype: torch.dtype
) -> None:
    weight = quantize(normal(4 * 32, 128, seed=5), QuantFormat.FP8_BLOCK128)
    x_TGK = normal(3, 4, 128, seed=6, dtype=dtype)
    y_TGR = ops.grouped_linear(x_TGK, ops.pack_weight(weight))
    assert y_TGR.dtype == dtype
    rows = weight.dequantize().double()
    exact = [x_TGK[:, g].double() @ rows[32 * g : 32 * (g + 1)].T for g in range(4)]
    assert_rounded_once(y_TGR, torch.stack(exact, dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_numbers_are_exact(ops: OpsUnderTest, dtype: torch.dtype) -> None:
    """Sums below 2²⁴ are exact in float32 in any order, so the only rounding is the one to the
    dtype of x.
    """
    x = integers(-8, 8, 5, 640, seed=7, dtype=dtype)
    weight = integers(-8, 8, 48, 640, seed=8, dtype=torch.bfloat16)
    y = ops.linear(x, ops.pack_weight(QuantTensor.dense(weight)))
    assert torch.equal(y, (x.double() @ weight.double().T).to(dtype))


def test_strided_input(ops: OpsUnderTest) -> None:
    weight = ops.pack_weight(QuantTensor.dense(normal(8, 64, seed=9)))
    wide = normal(4, 128, seed=10)
    assert torch.equal(
        ops.linear(wide[:, ::2], weight), ops.linear(wide[:, ::2].contiguous(), weight)
    )
    x_GTK = normal(2, 4, 64, seed=11)
    strided = x_GTK.transpose(0, 1)
    packed = x_GTK.transpose(0, 1).contiguous()
    assert torch.equal(ops.grouped_linear(strided, weight), ops.grouped_linear(packed, weight))


def test_packing_keeps_the_values(ops: OpsUnderTest) -> None:
    for format in FORMATS:
        stored = quantize(normal(16, 128, seed=12), format)
        packed = ops.pack_weight(stored)
        assert packed.shape == stored.shape
        assert torch.equal(packed.dequantize(), stored.dequantize())


@pytest.mark.slow
def test_lesson_08_no_activation_scale_is_kept_from_an_earlier_step(ops: OpsUnderTest) -> None:
    """After a step with tiny activations a step with huge ones is as exact as it would have been
    first.
    """
    weight = ops.pack_weight(quantize(normal(32, 128, seed=13), QuantFormat.NVFP4))
    huge = normal(2, 128, seed=14, scale=1e4)
    first = ops.linear(huge, weight)
    ops.linear(huge * 1e-8, weight)
    assert torch.equal(ops.linear(huge, weight), first)
    both = ops.linear(torch.cat((huge * 1e-8, huge)), weight)
    torch.testing.assert_close(both, torch.cat((first * 1e-8, first)), rtol=6e-6, atol=0)


def test_wrong_width_is_a_value_error_that_names_the_argument(ops: OpsUnderTest) -> None:
    weight = ops.pack_weight(QuantTensor.dense(torch.zeros(8, 32)))
    with pytest.raises(ValueError, match=r"^x: found width 16, expected K = 32"):
        ops.linear(torch.zeros(2, 16), weight)


@pytest.mark.parametrize("shape", [(2, 2, 16), (2, 3, 32)], ids=["width", "groups"])
def test_wrong_groups_are_a_value_error_that_names_the_argument(
    ops: OpsUnderTest, shape: tuple[int, ...]
) -> None:
    weight = ops.pack_weight(QuantTensor.dense(torch.zeros(8, 32)))
    with pytest.raises(ValueError, match=r"^x: found \("):
        ops.grouped_linear(torch.zeros(shape), weight)
