"""Experts with native copies: w1 and w3 in one of them, all three matrices or none."""

import pytest
import torch

from dsv4.layers.weights import WeightReader
from dsv4.ops.linear.row_list import PackedRows
from dsv4.ops.moe.native import NativeExperts, pack_native_experts
from dsv4.ops.native_packing import native_packing
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.weights.test_native import stored

FP8, MXFP4, NVFP4 = QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4


def matrices(
    format: QuantFormat, inner: int = 128, disguised: bool = False
) -> dict[str, QuantTensor]:
    """w1, w2 and w3 of two experts."""
    return {
        "w1": stored(format, (2, inner, 256), disguised),
        "w2": stored(format, (2, 256, inner), disguised),
        "w3": stored(format, (2, inner, 256), disguised),
    }


@pytest.mark.parametrize(
    ("format", "nvfp4"), [(FP8, False), (MXFP4, True), (NVFP4, False), (NVFP4, True)]
)
def test_all_three_matrices_have_native_copies(format: QuantFormat, nvfp4: bool) -> None:
    given = matrices(format, disguised=True)
    experts = pack_native_experts(**given, nvfp4=nvfp4)
    assert experts.unsupported is None
    assert experts.gate_up is not None
    assert isinstance(experts.w2, PackedWithNative)
    assert experts.w2.native is not None
    w1, w3 = experts.gate_up.split()
    copies = {"w1": w1, "w2": experts.w2.native, "w3": w3}
    for name, copy in copies.items():
        assert torch.equal(copy.dequantize(), given[name].dequantize())
        assert torch.equal(getattr(experts, name).dequantize(), given[name].dequantize())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (matrices(NVFP4), "w1: NVFP4 scales are not powers of two in equal pairs"),
        ({"w2": stored(MXFP4, (2, 256, 128))}, "w2: mxfp4 beside fp8_block128 of w1"),
        (matrices(FP8, inner=64), "w1: 64 rows are no multiple of 128"),
        (
            {"w3": QuantTensor.dense(torch.zeros(2, 128, 256))},
            "w3: f32 weights have no native form as f32",
        ),
    ],
    ids=["plain NVFP4", "two formats", "half a tile", "F32"],
)
def test_experts_without_native_copies_say_why(
    changed: dict[str, QuantTensor], reason: str
) -> None:
    experts = pack_native_experts(**matrices(FP8) | changed, nvfp4=False)
    assert experts.unsupported == reason
    assert experts.gate_up is None
    assert isinstance(experts.w2, PackedWithNative)
    assert (experts.w2.native, experts.w2.unsupported) == (None, reason)


def test_the_packing_of_a_model_makes_them() -> None:
    weights = {f"experts.{name}.weight": weight for name, weight in matrices(FP8).items()}
    weights["linear"] = stored(FP8, (64, 128))
    reader = WeightReader(weights, native_packing("fp8"))
    experts = reader.experts("experts")
    assert isinstance(experts, NativeExperts)
    assert experts.gate_up is not None
    rows = reader.row_list(["linear"], [None])
    assert isinstance(rows, PackedRows)
    for weight in (reader.matrix("linear"), *rows.weights):
        assert isinstance(weight, PackedWithNative)
        assert weight.native is not None
