"""linear and grouped_linear: float32 accumulation of the dequantised weight, one rounding, shapes checked."""

import pytest
import torch

from dsv4.ops import Ops
from dsv4.quant import QuantFormat, QuantTensor, quantize
from tests.ops.cases import assert_rounded_once, normal

FORMATS = list(QuantFormat)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_linear_is_x_times_the_dequantised_weight(
    ops: Ops, format: QuantFormat, dtype: torch.dtype, tokens: int
) -> None:
    weight = quantize(normal(160, 192, seed=1, scale=0.1), format)
    x = normal(tokens, 192, seed=2, dtype=dtype)
    y = ops.linear(x, ops.pack_weight(weight))
    assert y.dtype == dtype
    assert y.shape == (tokens, 160)
    if tokens:
        assert_rounded_once(y, x.double() @ weight.dequantize().double().T)


def test_out_dtype_keeps_the_float32_sum(ops: Ops) -> None:
    weight = quantize(normal(32, 256, seed=3), QuantFormat.BF16)
    x = normal(4, 256, seed=4, dtype=torch.bfloat16)
    y = ops.linear(x, ops.pack_weight(weight), torch.float32)
    assert y.dtype == torch.float32
    assert_rounded_once(y, x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear_multiplies_each_group_by_its_own_rows(ops: Ops, dtype: torch.dtype) -> None:
    weight = quantize(normal(4 * 32, 128, seed=5), QuantFormat.FP8_BLOCK128)
    x_TGK = normal(3, 4, 128, seed=6, dtype=dtype)
    y_TGR = ops.grouped_linear(x_TGK, ops.pack_weight(weight))
    assert y_TGR.dtype == dtype
    rows = weight.dequantize().double()
    exact = [x_TGK[:, g].double() @ rows[32 * g : 32 * (g + 1)].T for g in range(4)]
    assert_rounded_once(y_TGR, torch.stack(exact, dim=1))


def test_wrong_width_is_a_value_error_that_names_the_argument(ops: Ops) -> None:
    weight = ops.pack_weight(QuantTensor.dense(torch.zeros(8, 32)))
    with pytest.raises(ValueError, match=r"^x: found width 16, expected K = 32"):
        ops.linear(torch.zeros(2, 16), weight)


@pytest.mark.parametrize("shape", [(2, 2, 16), (2, 3, 32)], ids=["width", "groups"])
def test_wrong_groups_are_a_value_error_that_names_the_argument(ops: Ops, shape: tuple[int, ...]) -> None:
    weight = ops.pack_weight(QuantTensor.dense(torch.zeros(8, 32)))
    with pytest.raises(ValueError, match=r"^x: found \("):
        ops.grouped_linear(torch.zeros(shape), weight)
