"""Weights that are read when they are used."""

import pytest
import torch

from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.quant import QuantTensor

STACK = QuantTensor.dense(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)))


def test_a_matrix_of_a_stack_is_read_when_its_values_are_asked_for() -> None:
    read: list[int | None] = []

    def reader(index: int | None) -> QuantTensor:
        read.append(index)
        return STACK if index is None else STACK[index]

    weight = WeightOnDemand(STACK.shape, STACK.nbytes, reader)
    matrix = weight[2]
    assert (matrix.shape, matrix.nbytes, read) == ((4, 8), STACK.nbytes // 3, [])
    assert torch.equal(matrix.dequantize(), STACK.data[2])
    assert torch.equal(weight.dequantize(), STACK.data)
    assert read == [2, None]


def test_a_matrix_is_no_stack() -> None:
    weight = WeightOnDemand(STACK.shape, STACK.nbytes, lambda _: STACK)
    with pytest.raises(ValueError, match=r"shape \(4, 8\) is one matrix, not a stack"):
        weight[0][1]
