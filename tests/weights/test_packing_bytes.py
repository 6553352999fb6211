"""What packing holds besides a weight, against what is alive at the peak."""

import pytest
import torch

from dsv4.ops import TORCH_PACKING
from dsv4.weights.packed import pack_weight
from dsv4.weights.packing_bytes import dequantizing_bytes, packing_bytes
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat
from dsv4.weights.quantize import quantize
from tests.live_bytes import LiveBytes

SHAPES = pytest.mark.parametrize("shape", [(512, 1024), (16, 256, 512)], ids=["matrix", "stack"])
FORMATS = pytest.mark.parametrize("format", list(QuantFormat), ids=lambda format: format.value)


def parameter(shape: tuple[int, ...]) -> Parameter:
    return Parameter("x", shape, Role.EXPERT if len(shape) == 3 else Role.LINEAR)


@FORMATS
@SHAPES
def test_packing_takes_what_is_planned_and_at_least_half(
    format: QuantFormat, shape: tuple[int, ...]
) -> None:
    weight = quantize(torch.randn(shape).bfloat16().float(), format)
    with LiveBytes() as live:
        pack_weight(weight)
    planned = packing_bytes(parameter(shape), format, weight.nbytes)
    assert live.peak <= planned
    # Indexing widens the codes inside the operator, where they are not seen.
    assert planned <= 2.5 * live.peak


@FORMATS
@SHAPES
def test_dequantizing_takes_what_is_planned_and_at_least_half(
    format: QuantFormat, shape: tuple[int, ...]
) -> None:
    weight = quantize(torch.randn(shape).bfloat16().float(), format)
    with LiveBytes() as live:
        packed = TORCH_PACKING.pack_weight(weight)
    kept = packed.nbytes if format is not QuantFormat.F32 else 0
    planned = dequantizing_bytes(parameter(shape), format)
    assert live.peak - kept <= planned
    assert planned <= 2.5 * (live.peak - kept) or planned == 0
