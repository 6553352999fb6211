"""The torch ops on packed weights round activations as the torch table does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.native.emulation import emulation
from dsv4.native.operands import Product
from dsv4.native.random_weights import RandomWeights
from dsv4.ops import TORCH, Packing
from dsv4.ops.linear import RowList
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.moe import Mixture
from dsv4.ops.moe.native import pack_native_experts
from dsv4.ops.tables import TORCH_TABLE, RecordedTable, decode_ops, prefill_ops, torch_table
from dsv4.weights.packed_native import PackedWithNative, pack_with_native
from dsv4.weights.quant import QuantFormat, QuantTensor

CPU = torch.device("cpu")
NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16


def native_table(mode: ActivationMode) -> RecordedTable:
    nvfp4 = mode == "nvfp4"

    def pack(weight: QuantTensor) -> PackedWithNative:
        return pack_with_native(weight, nvfp4)

    packing = Packing(
        f"native {mode}",
        pack,
        lambda weights, out_dtypes: pack_rows(weights, out_dtypes, pack),
        lambda w1, w2, w3: pack_native_experts(w1, w2, w3, nvfp4),
    )
    return RecordedTable(packing, decode_ops, prefill_ops)


def results(product: Product, mode: ActivationMode) -> tuple[Tensor, Tensor]:
    """By the emulation of packed weights, and by the torch table."""
    found = []
    pairs = ((emulation(TORCH_TABLE), native_table(mode)), (torch_table(mode), torch_table(mode)))
    for ops, packed in pairs:
        y = getattr(ops.ops, product.op)(*product.operands(packed, CPU))
        found.append(y.y_TE if isinstance(y, Mixture) else y)
    return found[0], found[1]


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
@pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8, BF16])
@pytest.mark.parametrize(
    ("op", "sizes"),
    [("linear", (128, 256)), ("grouped_linear", (2, 128, 128)), ("moe", (128, 128, 4))],
)
def test_packed_weights_multiply_what_the_torch_table_does(
    mode: ActivationMode, format: QuantFormat, op: str, sizes: tuple[int, ...]
) -> None:
    product = Product(op, format, 20, sizes)
    found, expected = results(product, mode)
    _, unrounded = results(product, "bf16")
    # No kernel multiplies groups that share the global scale of a row.
    of_groups = op == "grouped_linear" and format is NVFP4
    assert torch.equal(found, unrounded if of_groups else expected)
    if op == "moe":  # Its shared expert is FP8 in every format.
        return
    kept = format is BF16 or (mode == "fp8" and format is NVFP4) or of_groups
    assert torch.equal(found, unrounded) == kept


def test_products_that_are_not_rounded_are_those_of_the_portable_kernels() -> None:
    """They need no decoded weights, which for a large matrix may be more than there is room for."""
    asked: list[str] = []

    def note(name: str) -> Any:
        return lambda *arguments: asked.append(name)

    names = ("linear", "linear_rows", "grouped_linear", "moe")
    portable = replace(TORCH, **{name: note(name) for name in names})
    ops = emulation(replace(TORCH_TABLE, ops=portable)).ops
    packed = native_table("fp8")
    for op, sizes in (("linear", (128, 256)), ("grouped_linear", (2, 128, 128))):
        getattr(ops, op)(*Product(op, BF16, 20, sizes).operands(packed, CPU))
    operands = Product("moe", BF16, 20, (128, 128, 4)).operands(packed, CPU)
    x, tokens_T, router, experts, _, limit = operands
    ops.moe(x, tokens_T, router, experts, experts, limit)
    dense = packed.packing.pack_weight(RandomWeights(CPU).weight(BF16, 64, 128))
    ops.linear_rows(x, RowList((dense,), (None,)))
    assert asked == ["linear", "grouped_linear", "moe", "linear_rows"]


def test_row_lists_are_rounded_behind_their_norm() -> None:
    stored = [RandomWeights(CPU).weight(format, 64, 256) for format in (FP8, BF16)]
    x = RandomWeights(CPU, 2).rows(20, 256)
    norm_weight = torch.rand(256, dtype=torch.float32) + 0.5
    dtypes = (None, torch.float32)
    packed = native_table("fp8").packing.pack_rows(stored, dtypes)
    found = emulation(TORCH_TABLE).ops.linear_rows(x, packed, norm_weight, 1e-5)
    rows = torch_table("fp8").packing.pack_rows(stored, dtypes)
    expected = TORCH.linear_rows(x, rows, norm_weight, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
