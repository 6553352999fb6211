"""The torch ops on packed weights round activations as the torch table does."""

import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.native.emulation import EMULATION
from dsv4.native.operands import Product
from dsv4.ops import Packing
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.moe import Mixture
from dsv4.ops.moe.native import pack_native_experts
from dsv4.ops.tables import RecordedTable, decode_ops, prefill_ops, torch_table
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
        pack,
        lambda weights, out_dtypes: pack_rows(weights, out_dtypes, pack),
        lambda w1, w2, w3: pack_native_experts(w1, w2, w3, nvfp4),
    )
    return RecordedTable(packing, decode_ops, prefill_ops)


def results(product: Product, mode: ActivationMode) -> tuple[Tensor, Tensor]:
    """By the emulation of packed weights, and by the torch table."""
    found = []
    pairs = ((EMULATION, native_table(mode)), (torch_table(mode), torch_table(mode)))
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
    assert torch.equal(found, expected)
    if op == "moe":  # Its shared expert is FP8 in every format.
        return
    _, unrounded = results(product, "bf16")
    assert torch.equal(found, unrounded) == (format is BF16 or (mode == "fp8" and format is NVFP4))
