"""Quantised activations: their bytes against arithmetic on single values, what no number is, and
that rows know nothing of each other.
"""

import json
import math

import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ACTIVATION_MODES
from dsv4.ops.quantize_activations import (
    ActivationFormat,
    QuantizedRows,
    activation_format,
    hidden_global_scale,
    quantize_fp8,
    quantize_nvfp4,
    quantize_rows,
)
from dsv4.weights.codes import E4M3_MAX
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.quantize_activations.values import E4M3, all_bfloat16, fp8_bytes, nvfp4_bytes
from tests.releases import DATA

FORMATS = list(ActivationFormat)
VECTORS = json.loads((DATA / "numeric_vectors.json").read_text())


def ragged(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows whose groups of 16 have sizes of their own, over 2^24."""
    x = normal(rows, -(-columns // 16), 16, seed=seed)
    sizes = torch.exp2(normal(rows, x.shape[1], 1, seed=seed + 1) * 4)
    return (x * sizes).flatten(1)[:, :columns].bfloat16()


def unpacked(rows: QuantizedRows) -> Tensor:
    """One code per element."""
    if rows.format is ActivationFormat.FP8:
        return rows.codes
    return torch.stack((rows.codes & 15, rows.codes >> 4), dim=-1).flatten(-2)


def test_which_weights_take_which_activations() -> None:
    fp8, nvfp4 = ActivationFormat.FP8, ActivationFormat.NVFP4
    taken = {
        mode: {
            format: found
            for format in QuantFormat
            if (found := activation_format(mode, format)) is not None
        }
        for mode in ACTIVATION_MODES
    }
    coarse = {QuantFormat.FP8_BLOCK128: fp8, QuantFormat.MXFP4: fp8}
    assert taken == {
        "bf16": {},
        "fp8": coarse,
        "nvfp4": {**coarse, QuantFormat.NVFP4: nvfp4},
    }


@pytest.mark.parametrize("columns", [128, 256, 300])
def test_fp8_bytes_are_those_of_single_values(columns: int) -> None:
    x = ragged(3, columns, seed=columns)
    rows = quantize_fp8(x)
    padded = -(-columns // 128) * 128
    assert rows.codes.shape == (3, padded)
    assert rows.scales.shape == (3, padded // 32)
    values = torch.nn.functional.pad(x.float(), (0, padded - columns)).tolist()
    for row, codes, scales in zip(values, rows.codes.tolist(), rows.scales.tolist(), strict=True):
        for first in range(0, padded, 128):
            expected, scale = fp8_bytes(row[first : first + 128])
            assert codes[first : first + 128] == expected
            assert scales[first // 32 : first // 32 + 4] == [scale] * 4


@pytest.mark.parametrize("columns", [64, 272])
@pytest.mark.parametrize("fixed", [None, 0.125])
def test_nvfp4_bytes_are_those_of_single_values(columns: int, fixed: float | None) -> None:
    x = ragged(3, columns, seed=columns)
    rows = quantize_nvfp4(x, fixed)
    padded = -(-columns // 64) * 64
    assert rows.codes.shape == (3, padded // 2)
    assert rows.scales.shape == (3, padded // 16)
    assert rows.global_scale is not None
    amax = x.float().abs().amax(1)
    total = torch.full((3,), fixed) if fixed else amax * torch.tensor(1 / 2688)
    assert torch.equal(rows.global_scale, total)
    values = torch.nn.functional.pad(x.float(), (0, padded - columns)).tolist()
    codes = unpacked(rows).tolist()
    for row, found, scales, scale_of_row in zip(
        values, codes, rows.scales.tolist(), total.tolist(), strict=True
    ):
        for first in range(0, padded, 16):
            expected, scale = nvfp4_bytes(row[first : first + 16], scale_of_row)
            assert found[first : first + 16] == expected
            assert scales[first // 16] == scale


@pytest.mark.parametrize("amax", list(VECTORS["ue8m0_scale_exponent_fp8"]))
def test_fp8_scales_are_the_published_ones(amax: str) -> None:
    x = torch.zeros(1, 128)
    x[0, 77] = -float(amax)
    expected = VECTORS["ue8m0_scale_exponent_fp8"][amax] + 127
    assert quantize_fp8(x).scales.tolist() == [[expected] * 4]


def test_fp8_keeps_every_bfloat16_to_half_a_step() -> None:
    x = all_bfloat16()
    # Beyond, a value may round to 2^128.
    x = x[x.float().abs() <= 2.0**127].view(-1, 1)
    found = quantize_fp8(x).dequantize()
    # Alone in its group a value has 3 bits of fraction, or is below the floor of 1e-4, whose step
    # is 2^-9 of the scale 2^-22.
    bound = torch.maximum(x.float().abs() * 2**-4, torch.tensor(2.0**-32))
    assert bool(((found - x.float()).abs() <= bound).all())


def test_nvfp4_scales_reach_e4m3s_largest_value_and_no_further() -> None:
    x = ragged(64, 256)
    rows = quantize_nvfp4(x)
    largest = rows.scales.view(torch.float8_e4m3fn).float().amax(1)
    assert bool((largest == E4M3_MAX).all())
    error = (rows.dequantize() - x.float()).abs().unflatten(1, (-1, 16)).amax(2)
    amax = x.float().abs().unflatten(1, (-1, 16)).amax(2)
    # Half a step of E2M1 near 6 and the rounding of a scale; small groups end at half the smallest
    # scale of their row.
    smallest = x.float().abs().amax(1, keepdim=True) * (2**-10 / E4M3_MAX)
    assert bool((error <= torch.maximum(amax * 0.23, smallest)).all())


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_others(format: ActivationFormat) -> None:
    x = ragged(5, 320)
    whole = quantize_rows(x, format)
    others = torch.full_like(x, torch.nan)
    for row in range(5):
        others[row] = x[row]
        for found in (quantize_rows(x[row : row + 1], format), quantize_rows(others, format)):
            at = row if found.codes.shape[0] == 5 else 0
            assert torch.equal(found.codes[at], whole.codes[row])
            assert torch.equal(found.scales[at], whole.scales[row])
            if whole.global_scale is not None:
                assert found.global_scale is not None
                assert found.global_scale[at] == whole.global_scale[row]
        others[row] = math.nan


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: ActivationFormat) -> None:
    rows = quantize_rows(torch.zeros(2, 64), format)
    assert not rows.codes.any()
    assert bool((rows.dequantize() == 0).all())
    tiny = quantize_rows(torch.full((1, 64), 2.0**-130), format)
    assert bool((tiny.dequantize() == 0).all())


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_nan_afterwards(lost: float) -> None:
    x = torch.ones(2, 256)
    x[1, 130] = lost
    fp8 = quantize_fp8(x)
    assert bool((fp8.codes[1, 128:] == 0x7F).all())
    assert fp8.scales[1].tolist() == [fp8.scales[0, 0]] * 4 + [0xFF] * 4
    found = fp8.dequantize()
    assert bool(found[1, 128:].isnan().all())
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[1, :128], x[1, :128])

    nvfp4 = quantize_nvfp4(x)
    assert bool(nvfp4.dequantize()[1].isnan().all())
    assert bool((nvfp4.scales[1] == 0x7F).all())
    assert not nvfp4.codes[1].any()
    assert bool(nvfp4.dequantize()[0].isfinite().all())

    fixed = quantize_nvfp4(x, 2.0**-3)
    assert fixed.scales[1].tolist() == [
        0x7F if group == 8 else fixed.scales[0, 0] for group in range(16)
    ]
    assert not fixed.codes[1, 64:72].any()
    assert fixed.dequantize()[1].isnan().nonzero().flatten().tolist() == list(range(128, 144))


@pytest.mark.parametrize("format", FORMATS)
def test_columns_beyond_the_width_are_zero(format: ActivationFormat) -> None:
    x = ragged(2, 72)
    rows = quantize_rows(x, format)
    assert rows.columns == 72
    assert rows.dequantize().shape == (2, 72)
    assert not unpacked(rows)[:, 72:].any()
    wide = torch.nn.functional.pad(x, (0, 56))
    assert torch.equal(quantize_rows(wide, format).codes, rows.codes)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: ActivationFormat) -> None:
    rows = quantize_rows(torch.empty(0, 128), format)
    assert rows.codes.shape[0] == rows.scales.shape[0] == 0
    assert rows.dequantize().shape == (0, 128)


@pytest.mark.parametrize(("limit", "weight"), [(10.0, 1.5), (10.0, 2.5), (7.0, 1.0)])
def test_hidden_rows_cannot_saturate(limit: float, weight: float) -> None:
    total = hidden_global_scale(limit, weight)
    assert math.frexp(total)[0] == 0.5
    bound = limit * limit * weight
    assert total / 2 < bound / 2688 <= total
    rows = quantize_nvfp4(torch.full((1, 16), bound), total)
    assert rows.scales[0, 0] <= E4M3.index(E4M3_MAX)
    error = (rows.dequantize() - bound).abs().max()
    assert float(error) <= bound / 16


def test_the_hidden_scale_of_a_power_of_two_is_itself() -> None:
    assert hidden_global_scale(1.0, 2688.0) == 1.0
    assert hidden_global_scale(1.0, 2689.0) == 2.0
