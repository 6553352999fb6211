"""Weights of normal numbers for kernels that the CPU executes."""

from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.cases import normal


def normal_weight(format: QuantFormat, rows: int, columns: int) -> QuantTensor:
    """The same ones every time."""
    values = normal(rows, columns, seed=rows)
    if format is QuantFormat.BF16:
        return QuantTensor.dense(values.bfloat16())
    return quantize(values, format)
