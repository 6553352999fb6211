"""Formats come from declarations and names together: rows E of docs/regressions.md that a loader
can get wrong.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import Dialect, open_checkpoint, tiny_config, write_synthetic
from dsv4.errors import UserError
from dsv4.weights.quant import QuantFormat, QuantTensor, exponent_to_e8m0
from tests.checkpoint.folders import Tensors, as_bytes, changed_copy, load, matrix, read_tensors


def quantization(folder: Path, **changes: Any) -> dict[str, Any]:
    """``quantization_config`` of a folder with other values; None removes a key."""
    declared = {
        **json.loads((folder / "config.json").read_text())["quantization_config"],
        **changes,
    }
    return {
        "quantization_config": {key: value for key, value in declared.items() if value is not None}
    }


def without_hf_quant_config(folder: Path) -> Path:
    (folder / "hf_quant_config.json").unlink()
    return folder


@pytest.mark.parametrize("ignored", [True, False])
def test_spec11_e30_mtp_experts_stay_mxfp4_although_moe_quant_algo_says_nvfp4(
    nvfp4_experts: Path, tmp_path: Path, ignored: bool
) -> None:
    config = quantization(nvfp4_experts, **({} if ignored else {"ignore": None}))
    folder = without_hf_quant_config(changed_copy(nvfp4_experts, tmp_path / "x", config=config))
    weights = load(folder, mtp="classic")
    assert matrix(weights, "layers.3.ffn.experts.w1.weight").format is QuantFormat.NVFP4
    assert matrix(weights, "mtp.0.ffn.experts.w1.weight").format is QuantFormat.MXFP4
    assert matrix(weights, "mtp.0.e_proj.weight").format is QuantFormat.FP8_BLOCK128


def test_spec11_e30_ignore_wins_over_quantized_layers(nvfp4_experts: Path, tmp_path: Path) -> None:
    layers = open_checkpoint(nvfp4_experts).raw_config["quantization_config"]["quantized_layers"]
    layers = {**layers, "mtp.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    config = quantization(nvfp4_experts, quantized_layers=layers)
    folder = without_hf_quant_config(changed_copy(nvfp4_experts, tmp_path / "x", config=config))
    assert (
        matrix(load(folder, mtp="classic"), "mtp.0.ffn.experts.w2.weight").format
        is QuantFormat.MXFP4
    )


def test_spec11_e30_nvfp4_declared_for_mxfp4_experts_is_refused(
    native: Path, tmp_path: Path
) -> None:
    config = quantization(
        native, quantized_layers={"layers.2.ffn.experts": {"quant_algo": "NVFP4"}}
    )
    with pytest.raises(
        UserError, match=r"layers.2.ffn.experts.0.w1 \(found mxfp4 or fp8, declared nvfp4\)"
    ):
        load(changed_copy(native, tmp_path / "x", config=config))


def test_spec11_e30_nvfp4_experts_that_nobody_declared_are_refused(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    config = quantization(
        nvfp4_experts, quantized_layers=None, moe_quant_algo=None, quant_algo=None
    )
    folder = without_hf_quant_config(changed_copy(nvfp4_experts, tmp_path / "x", config=config))
    with pytest.raises(
        UserError, match=r"12 not in the declared format: .*found nvfp4, declared mxfp4"
    ) as caught:
        load(folder)
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize("layout", ["nvfp4_experts", "nvfp4_all", "native", "bf16"])
def test_without_any_declaration_the_scales_decide(
    layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(layout)
    folder = changed_copy(source, tmp_path / "x", config={"quantization_config": None})
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    found = {
        name: weight.format
        for name, weight in load(folder).items()
        if isinstance(weight, QuantTensor)
    }
    assert found == {
        name: weight.format
        for name, weight in load(source).items()
        if isinstance(weight, QuantTensor)
    }


def test_quant_algo_alone_is_a_modelopt_declaration(nvfp4_all: Path, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_algo": "NVFP4", "group_size": 16}}
    folder = without_hf_quant_config(changed_copy(nvfp4_all, tmp_path / "x", config=config))
    assert matrix(load(folder), "layers.0.attn.wq_a.weight").format is QuantFormat.NVFP4


def test_config_groups_are_not_applied_to_every_linear(nvfp4_experts: Path) -> None:
    declared = open_checkpoint(nvfp4_experts).raw_config["quantization_config"]
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert (
        matrix(load(nvfp4_experts), "layers.0.attn.wq_a.weight").format is QuantFormat.FP8_BLOCK128
    )


def test_moe_quant_algo_alone_means_the_experts_of_the_main_layers(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    config = quantization(nvfp4_experts, quantized_layers=None, ignore=None)
    folder = without_hf_quant_config(changed_copy(nvfp4_experts, tmp_path / "x", config=config))
    weights = load(folder, mtp="classic")
    assert matrix(weights, "layers.0.ffn.experts.w3.weight").format is QuantFormat.NVFP4
    assert matrix(weights, "mtp.0.ffn.experts.w3.weight").format is QuantFormat.MXFP4


def test_declaration_may_come_from_hf_quant_config_alone(nvfp4_all: Path, tmp_path: Path) -> None:
    folder = changed_copy(nvfp4_all, tmp_path / "x", config={"quantization_config": None})
    assert matrix(load(folder), "layers.0.attn.wo_a.weight").format is QuantFormat.NVFP4


def test_two_declarations_that_contradict_are_refused(nvfp4_all: Path, tmp_path: Path) -> None:
    config = quantization(nvfp4_all, quant_algo="MIXED_PRECISION")
    with pytest.raises(
        UserError,
        match="quant_algo: found 'MIXED_PRECISION', expected 'NVFP4' as in hf_quant_config",
    ):
        load(changed_copy(nvfp4_all, tmp_path / "x", config=config))


def test_modules_excluded_from_nvfp4_are_unquantised(nvfp4_all: Path, tmp_path: Path) -> None:
    name = "layers.1.attn.wo_a"

    def edit(tensors: Tensors) -> None:
        for component in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{name}.{component}"]
        tensors[f"{name}.weight"] = torch.ones(128, 256, dtype=torch.bfloat16)

    with pytest.raises(
        UserError, match=r"layers.1.attn.wo_a \(found unquantised, declared nvfp4\)"
    ):
        load(changed_copy(nvfp4_all, tmp_path / "x", edit))
    config = quantization(nvfp4_all, ignore=["head", "*.1.attn.wo_a"])
    weights = load(without_hf_quant_config(changed_copy(nvfp4_all, tmp_path / "y", edit, config)))
    assert matrix(weights, f"{name}.weight").format is QuantFormat.BF16


def test_modules_not_to_convert_may_be_named_in_hf_names(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a", tiny_config(), "native", 1, names=Dialect.HF)
    name = "model.layers.0.mlp.shared_experts.down_proj"

    def edit(tensors: Tensors) -> None:
        del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{name}.weight"] = torch.ones(128, 64)

    config = quantization(tmp_path / "a", modules_to_not_convert=[name])
    weights = load(changed_copy(tmp_path / "a", tmp_path / "b", edit, config))
    assert matrix(weights, "layers.0.ffn.shared_experts.w2.weight").format is QuantFormat.F32


def test_unquantised_names_under_a_quantised_declaration_are_refused(
    bf16: Path, native: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="found unquantised, declared fp8_block128"):
        load(changed_copy(bf16, tmp_path / "x", config=quantization(native)))


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


@pytest.mark.parametrize(
    "name", ["mtp.0.e_proj.scale", "mtp.0.h_proj.weight", "mtp.0.ffn.experts.7.w1.scale"]
)
def test_spec11_e32_every_mtp_tensor_is_expected(native: Path, tmp_path: Path, name: str) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    folder = changed_copy(native, tmp_path / "x", edit)
    load(folder)
    with pytest.raises(UserError, match=f"1 missing: {name}"):
        load(folder, mtp="classic")


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
        tensors[scale] = exponent_to_e8m0(torch.arange(64 * 4).view(64, 4) % 20 - 10)

    folder = changed_copy(native, tmp_path / "x", edit)
    stored = read_tensors(folder)
    loaded = matrix(load(folder), "layers.2.ffn.experts.w1.weight")
    assert loaded.block_scale is not None
    assert torch.equal(loaded.data[0], stored[weight].view(torch.uint8))
    assert torch.equal(loaded.block_scale[0].view(torch.uint8), stored[scale].view(torch.uint8))
    # Byte 0x9A: low nibble 0xA = -1, high nibble 0x9 = -0.5; the row's first scale is 2^-10.
    place = int((loaded.data[0, 0] == 0x9A).nonzero()[0])
    values = loaded.dequantize()[0, 0, 2 * place : 2 * place + 2]
    exponent = (place // 16) % 20 - 10
    assert values.tolist() == [-1.0 * 2.0**exponent, -0.5 * 2.0**exponent]


def test_spec11_e35_e8m0_written_as_plain_bytes_is_viewed(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        return {**tensors, **{name: tensor.view(torch.uint8) for name, tensor in experts.items()}}

    expected = load(native)
    weights = load(changed_copy(native, tmp_path / "x", edit))
    assert all(as_bytes(weights[name]) == as_bytes(expected[name]) for name in expected)


def test_spec11_e35_partial_blocks_have_their_scale_rows(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x", tiny_config(hidden_size=160, q_lora_rank=136), "native", 1)
    wq_a = matrix(load(tmp_path / "x"), "layers.0.attn.wq_a.weight")
    assert wq_a.block_scale is not None
    assert wq_a.block_scale.shape == (2, 2)


def test_spec11_e37_base_models_have_fp8_experts_and_float32_scales(
    native: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            weight = name.replace(".scale", ".weight")
            if ".ffn.experts." in name:
                rows = tensors[weight].shape[0]
                columns = 2 * tensors[weight].shape[1]
                tensors[weight] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
            blocks = [math.ceil(size / 128) for size in tensors[weight].shape]
            tensors[name] = torch.full(blocks, 0.3)

    folder = changed_copy(native, tmp_path / "x", edit, {"expert_dtype": "fp8"})
    weights = load(folder, mtp="classic")
    experts = matrix(weights, "layers.2.ffn.experts.w2.weight")
    assert experts.format is QuantFormat.FP8_BLOCK128
    assert experts.dequantize().unique().tolist() == [torch.tensor(0.3).item()]
    scale = matrix(weights, "layers.0.attn.wkv.weight").block_scale
    assert scale is not None
    assert scale.dtype is torch.float32


def test_expert_dtype_defaults_to_fp4(native: Path, tmp_path: Path) -> None:
    weights = load(changed_copy(native, tmp_path / "x", config={"expert_dtype": None}))
    assert matrix(weights, "layers.0.ffn.experts.w1.weight").format is QuantFormat.MXFP4


def test_compressed_tensors_names_are_refused_by_name(nvfp4_all: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.0.attn.wq_a.weight_packed"] = tensors.pop("layers.0.attn.wq_a.weight")

    with pytest.raises(UserError, match="compressed-tensors, which is not supported"):
        load(changed_copy(nvfp4_all, tmp_path / "x", edit))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method: found 'compressed-tensors'"),
        ({"quant_method": "gptq"}, "quant_method: found 'gptq'"),
        ({"quant_method": ["fp8"]}, "quant_method: found"),
        (
            {"quant_algo": "W4A8_AWQ"},
            "quant_algo: found 'W4A8_AWQ', expected 'NVFP4' or 'MIXED_PRECISION'",
        ),
        ({"moe_quant_algo": "MXFP4"}, "moe_quant_algo: found 'MXFP4'"),
        ({"group_size": 32}, "group_size: found 32, expected 16"),
        (
            {"weight_block_size": [32, 32]},
            r"weight_block_size: found \[32, 32\], expected \[128, 128\]",
        ),
        ({"fmt": "e5m2"}, "fmt: found 'e5m2'"),
        (
            {"quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "FP8"}}},
            "quantized_layers: 'layers.0.ffn.experts'",
        ),
        ({"quantized_layers": {"x": 1}}, "quantized_layers: 'x': found 1"),
        ({"quantized_layers": [1]}, "quantized_layers: found"),
        ({"ignore": "head"}, "ignore: found 'head', expected a list"),
        ({"ignore": [1]}, "ignore: found"),
    ],
)
def test_declarations_that_are_not_supported_are_refused_by_name(
    native: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(changed_copy(native, tmp_path / "x", config=quantization(native, **changes)))


@pytest.mark.parametrize("value", ["fp6", 4, None, ["fp4"]])
def test_unknown_expert_dtype_is_refused(native: Path, tmp_path: Path, value: object) -> None:
    folder = changed_copy(native, tmp_path / "x")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "expert_dtype": value}))
    with pytest.raises(UserError, match="expert_dtype: found"):
        load(folder)


def test_width_that_the_format_cannot_hold_is_a_clean_error(
    nvfp4_all: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="found K = 72, expected a multiple of 16 for nvfp4"):
        load(changed_copy(nvfp4_all, tmp_path / "x", config={"q_lora_rank": 72}))
