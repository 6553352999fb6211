"""PackedWithNative: a packed weight, and the same values for block-scaled tensor cores."""

import pytest
import torch

from dsv4.ops.linear.row_list import pack_rows
from dsv4.weights.native import native_weight
from dsv4.weights.packed import pack_weight
from dsv4.weights.packed_native import PackedWithNative, pack_with_native
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.weights.test_native import stored


@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize(
    "format",
    [QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4],
    ids=lambda f: f.value,
)
def test_both_forms_have_the_values_of_the_stored_weight(format: QuantFormat, nvfp4: bool) -> None:
    weight = stored(format, (2, 64, 128), disguised=not nvfp4)
    packed = pack_with_native(weight, nvfp4)
    plain = pack_weight(weight)
    assert torch.equal(packed.data, plain.data)
    assert packed.native is not None
    assert packed.unsupported is None
    expected = QuantFormat.MXFP4 if format is QuantFormat.NVFP4 and not nvfp4 else format
    assert packed.native.format is expected
    for one in (packed, packed[1]):
        assert one.native is not None
        assert torch.equal(one.native.dequantize(), one.dequantize())


def test_a_weight_without_native_copy_says_why() -> None:
    dense = pack_with_native(QuantTensor.dense(torch.ones(2, 64, 64).bfloat16()), nvfp4=True)
    for one in (dense, dense[1]):
        assert one.native is None
        assert one.unsupported == "bf16 weights have no native form as bf16"
    plain = pack_with_native(stored(QuantFormat.NVFP4, (64, 128)), nvfp4=False)
    assert plain.native is None
    assert plain.unsupported == "NVFP4 scales are not powers of two in equal pairs"


def test_matrices_of_a_row_list_keep_their_native_copies() -> None:
    weights = [stored(QuantFormat.FP8_BLOCK128, (rows, 128)) for rows in (64, 192)]
    rows = pack_rows(weights, [None, torch.float32], lambda weight: pack_with_native(weight, False))
    for weight, packed in zip(weights, rows.weights, strict=True):
        assert isinstance(packed, PackedWithNative)
        assert packed.native is not None
        assert torch.equal(packed.native.data, native_weight(weight, weight.format).data)
        assert torch.equal(packed.dequantize(), weight.dequantize())
