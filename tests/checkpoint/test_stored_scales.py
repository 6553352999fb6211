"""Scales and packed bytes of every format, read as they are: rows E of docs/regressions.md."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import Dialect, open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.export import export
from dsv4.checkpoint.layer_weights import StoredLayers
from dsv4.errors import UserError
from dsv4.weights.codes import exponent_to_e8m0
from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.quant import QuantFormat
from tests.checkpoint.folders import (
    CPU,
    Tensors,
    as_bytes,
    changed_copy,
    load,
    matrix,
    read_tensors,
)


def test_spec11_e31_w1_and_w3_keep_their_own_global_scales(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.4.w3.weight_scale_2"] *= 2

    before = load(nvfp4_experts)
    after = load(changed_copy(nvfp4_experts, tmp_path / "x", edit))
    w1, w3 = (
        matrix(after, f"layers.2.ffn.experts.{name}.weight").dequantize() for name in ("w1", "w3")
    )
    old1, old3 = (
        matrix(before, f"layers.2.ffn.experts.{name}.weight").dequantize() for name in ("w1", "w3")
    )
    assert torch.equal(w1, old1)
    assert torch.equal(w3[4], 2 * old3[4])
    assert torch.equal(w3[:4], old3[:4])


def test_spec11_e33_nvfp4_scales_that_would_give_nan_or_zero_are_refused(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    for value in (0.0, -1.0, math.inf, math.nan):

        def edit(tensors: Tensors, value: float = value) -> None:
            tensors["layers.3.ffn.experts.7.w2.weight_scale_2"].fill_(value)

        with pytest.raises(UserError, match="layers.3.ffn.experts.7.w2.weight_scale_2: found"):
            load(changed_copy(nvfp4_experts, tmp_path / f"x{value}", edit))


def test_spec11_e34_the_input_scale_of_every_expert_is_expected(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["layers.2.ffn.experts.6.w1.input_scale"]
        tensors["layers.2.ffn.experts.5.w1.input_scale"] = torch.ones(3)

    with pytest.raises(UserError) as caught:
        load(changed_copy(nvfp4_experts, tmp_path / "x", edit))
    assert "1 missing: layers.2.ffn.experts.6.w1.input_scale" in str(caught.value)
    assert "layers.2.ffn.experts.5.w1.input_scale (found [3], expected [])" in str(caught.value)


def test_nvfp4_without_any_input_scale_loads(nvfp4_experts: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {
            name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")
        }

    expected = load(nvfp4_experts)
    weights = load(changed_copy(nvfp4_experts, tmp_path / "x", edit))
    assert all(as_bytes(weights[name]) == as_bytes(expected[name]) for name in expected)


def test_the_input_scale_of_an_expert_that_no_token_reached_may_be_0(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.6.w1.input_scale"].fill_(0.0)

    load(changed_copy(nvfp4_experts, tmp_path / "x", edit))


def test_nvfp4_scalars_may_have_one_dimension(nvfp4_experts: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {
            name: tensor.view(1) if tensor.dim() == 0 else tensor
            for name, tensor in tensors.items()
        }

    expected = load(nvfp4_experts)
    weights = load(changed_copy(nvfp4_experts, tmp_path / "x", edit))
    assert all(as_bytes(weights[name]) == as_bytes(expected[name]) for name in expected)


def test_spec11_e35_e8m0_and_packed_bytes_arrive_as_they_are(native: Path, tmp_path: Path) -> None:
    weight = "layers.2.ffn.experts.0.w1.weight"
    scale = "layers.2.ffn.experts.0.w1.scale"

    def edit(tensors: Tensors) -> None:
        tensors[weight] = (
            torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(16).view(64, 64)
        )
        tensors[scale] = exponent_to_e8m0(torch.arange(64 * 4).view(64, 4) % 16 - 10)

    folder = changed_copy(native, tmp_path / "x", edit)
    stored = read_tensors(folder)
    loaded = matrix(load(folder), "layers.2.ffn.experts.w1.weight")
    assert loaded.block_scale is not None
    assert torch.equal(loaded.data[0], stored[weight].view(torch.uint8))
    assert torch.equal(loaded.block_scale[0].view(torch.uint8), stored[scale].view(torch.uint8))
    # Byte 0x9A: low nibble 0xA = -1, high nibble 0x9 = -0.5; the row's first scale is 2^-10.
    place = int((loaded.data[0, 0] == 0x9A).nonzero()[0])
    values = loaded.dequantize()[0, 0, 2 * place : 2 * place + 2]
    exponent = (place // 16) % 16 - 10
    assert values.tolist() == [-1.0 * 2.0**exponent, -0.5 * 2.0**exponent]


def test_spec11_e35_e8m0_written_as_plain_bytes_is_viewed(native: Path, tmp_path: Path) -> None:
    """Of experts in MXFP4 and of the other matrices, in FP8."""

    def edit(tensors: Tensors) -> Tensors:
        plain = (".experts.", ".scale")
        return {
            name: tensor.view(torch.uint8) if any(part in name for part in plain) else tensor
            for name, tensor in tensors.items()
        }

    expected = load(native)
    folder = changed_copy(native, tmp_path / "x", edit)
    weights = load(folder)
    assert all(as_bytes(weights[name]) == as_bytes(expected[name]) for name in expected)
    scale = matrix(weights, "layers.0.attn.wkv.weight").block_scale
    assert scale is not None
    assert scale.dtype is torch.float8_e8m0fnu
    export(folder, tmp_path / "exported", "native", Dialect.NATIVE)
    exported, published = (read_tensors(one) for one in (tmp_path / "exported", native))
    assert {name: one.dtype for name, one in exported.items()} == {
        name: one.dtype for name, one in published.items()
    }


def test_spec11_e35_partial_blocks_have_their_scale_rows(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x", tiny_config(hidden_size=160, q_lora_rank=136), "native", 1)
    wq_a = matrix(load(tmp_path / "x"), "layers.0.attn.wq_a.weight")
    assert wq_a.block_scale is not None
    assert wq_a.block_scale.shape == (2, 2)


@pytest.mark.parametrize("is_moved", [False, True])
def test_spec11_e37_base_models_have_fp8_experts_and_float32_scales(
    native: Path, tmp_path: Path, is_moved: bool
) -> None:
    """``expert_dtype`` may be in ``quantization_config``, where transformers writes it."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            weight = name.replace(".scale", ".weight")
            if ".ffn.experts." in name:
                rows = tensors[weight].shape[0]
                columns = 2 * tensors[weight].shape[1]
                tensors[weight] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
            blocks = [math.ceil(size / 128) for size in tensors[weight].shape]
            tensors[name] = torch.full(blocks, 0.3)

    config: dict[str, Any] = {"expert_dtype": "fp8"}
    if is_moved:
        declared = open_checkpoint(native).raw_config["quantization_config"]
        config = {"expert_dtype": None, "quantization_config": {**declared, **config}}
    weights = load(changed_copy(native, tmp_path / "x", edit, config), mtp="classic")
    experts = matrix(weights, "layers.2.ffn.experts.w2.weight")
    assert experts.format is QuantFormat.FP8_BLOCK128
    assert experts.dequantize().unique().tolist() == [torch.tensor(0.3).item()]
    scale = matrix(weights, "layers.0.attn.wkv.weight").block_scale
    assert scale is not None
    assert scale.dtype is torch.float32


def test_width_that_the_format_cannot_hold_is_a_clean_error(
    nvfp4_all: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="found K = 72, expected a multiple of 16 for nvfp4"):
        load(changed_copy(nvfp4_all, tmp_path / "x", config={"q_lora_rank": 72}))


def scale_of(weight: str) -> str:
    """The name of a weight's block scales in a file."""
    return weight.replace(".weight", ".scale")


@pytest.mark.parametrize("name", ["layers.0.attn.wkv.weight", "layers.2.ffn.experts.5.w1.weight"])
@pytest.mark.parametrize("code", [255, 254, 134])
def test_spec11_j88_e8m0_scales_out_of_range_are_refused_by_name(
    native: Path, tmp_path: Path, name: str, code: int
) -> None:
    """NaN, 2^127, and 2^7: the byte 120 of a scale of 2^-7, rounded to a power of two."""

    def edit(tensors: Tensors) -> None:
        tensors[scale_of(name)].view(torch.uint8)[-1, -1] = code

    folder = changed_copy(native, tmp_path / "x", edit)
    shown = {255: "nan", 254: "1.70141e+38", 134: "128"}[code]
    place = [0, 0] if "attn" in name else [63, 3]
    hint = "" if shown == "nan" else ": E8M0 bytes are exponents, not numbers"
    found = f"{scale_of(name)}: found {shown} at {place}, expected 0 to 64{hint}"
    with pytest.raises(UserError, match=f"{re.escape(found)}$"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("value", [0, 64])
def test_the_least_and_the_largest_scale_load(
    native: Path, tmp_path: Path, dtype: torch.dtype, value: int
) -> None:
    """Of E8M0 the bytes 0, which is 2^-127, and 133."""
    stored = {0: 0, 64: 133}[value] if dtype is torch.uint8 else value

    def edit(tensors: Tensors) -> None:
        for scale in [one for one in tensors if one.endswith(".scale") and ".experts." not in one]:
            tensors[scale] = torch.full(tensors[scale].shape, stored, dtype=dtype)

    load(changed_copy(native, tmp_path / "x", edit))


@pytest.mark.parametrize("value", [121.0, -0.01, math.inf, math.nan])
def test_spec11_j88_float32_scales_out_of_range_are_refused_by_name(
    native: Path, tmp_path: Path, value: float
) -> None:
    """121 is the byte of 2^-6 as a number."""
    name = "layers.1.attn.wq_b.weight"

    def edit(tensors: Tensors) -> None:
        for scale in [one for one in tensors if one.endswith(".scale") and ".experts." not in one]:
            tensors[scale] = torch.full(tensors[scale].shape, 0.02)
        tensors[scale_of(name)][0, 0] = value

    hint = ": E8M0 bytes are exponents, not numbers" if value == 121.0 else ""
    found = f"{scale_of(name)}: found {value:g} at [0, 0], expected 0 to 64{hint}"
    with pytest.raises(UserError, match=f"{re.escape(found)}$"):
        load(changed_copy(native, tmp_path / "x", edit))


@pytest.mark.parametrize(("code", "shown"), [(0x7F, "nan"), (0xFF, "nan"), (0xB8, "-1")])
@pytest.mark.parametrize("name", ["layers.0.attn.wkv.weight", "layers.2.ffn.experts.5.w2.weight"])
def test_nvfp4_block_scales_that_are_nan_or_negative_are_refused_with_their_place(
    nvfp4_all: Path, tmp_path: Path, name: str, code: int, shown: str
) -> None:
    def edit(tensors: Tensors) -> None:
        scale = tensors[f"{name}_scale"].view(torch.uint8)
        scale[3, 2] = code
        scale[0, 0] = 0x7E

    folder = changed_copy(nvfp4_all, tmp_path / "x", edit)
    found = f"{name}_scale: found {shown} at [3, 2], expected 0 to 448"
    with pytest.raises(UserError, match=f"{re.escape(found)}$"):
        load(folder)


@pytest.mark.parametrize(
    ("scale", "code", "found"),
    [
        ("weight_scale", 0x7F, "found nan at [0, 0], expected 0 to 448"),
        ("weight_scale_2", 0, "found 0.0, expected a finite number above 0"),
        (
            "weight_scale_2",
            0x44,
            "found 785.067 with block scales up to 2, expected a product of at most 64: "
            "global scales are factors, not divisors",
        ),
    ],
)
def test_the_scales_of_an_expert_that_is_read_alone_have_its_name(
    nvfp4_experts: Path, tmp_path: Path, scale: str, code: int, found: str
) -> None:
    name = f"layers.0.ffn.experts.1.w1.{scale}"

    def edit(tensors: Tensors) -> None:
        tensors[name].reshape(-1).view(torch.uint8)[: tensors[name].itemsize] = code

    source = StoredLayers(changed_copy(nvfp4_experts, tmp_path / "x", edit))
    experts = source.weights(0, CPU, on_demand=True)["layers.0.ffn.experts.w1.weight"]
    assert isinstance(experts, WeightOnDemand)
    experts[0].stored()
    with pytest.raises(UserError, match=f"{re.escape(f': {name}: {found}')}$"):
        experts[1].stored()
