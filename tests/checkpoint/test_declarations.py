"""Formats come from declarations and names together: rows E of docs/regressions.md that a loader
can get wrong.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import open_checkpoint
from dsv4.errors import UserError
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.checkpoint.folders import Tensors, changed_copy, load, matrix


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


def test_a_declaration_that_is_null_is_none(bf16: Path, tmp_path: Path) -> None:
    """As tools leave it in the config of weights that are not quantised any more."""
    folder = changed_copy(bf16, tmp_path / "x")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": None}))
    assert matrix(load(folder), "layers.0.attn.wq_a.weight").format is QuantFormat.BF16


def test_a_value_that_is_null_is_not_declared(nvfp4_all: Path, tmp_path: Path) -> None:
    declared = {"quant_method": None, "quant_algo": "NVFP4", "ignore": None, "fmt": None}
    config = {"quantization_config": {**declared, "quantized_layers": None}}
    folder = without_hf_quant_config(changed_copy(nvfp4_all, tmp_path / "x", config=config))
    assert matrix(load(folder), "layers.0.attn.wq_a.weight").format is QuantFormat.NVFP4


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


def test_a_module_that_one_declaration_lists_is_named(nvfp4_experts: Path, tmp_path: Path) -> None:
    declared = quantization(nvfp4_experts)["quantization_config"]["quantized_layers"]
    less = {name: entry for name, entry in declared.items() if name != "layers.3.ffn.experts"}
    more = {**declared, "layers.4.ffn.experts": {"quant_algo": "NVFP4"}}
    for number, (layers, message) in enumerate(
        (
            (less, "layers.3.ffn.experts: found None, expected {.*} as in hf_quant_config.json"),
            (more, "layers.4.ffn.experts: found {.*}, expected None as in hf_quant_config.json"),
        )
    ):
        config = quantization(nvfp4_experts, quantized_layers=layers)
        with pytest.raises(UserError, match=f"quantized_layers: {message}"):
            load(changed_copy(nvfp4_experts, tmp_path / str(number), config=config))


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


def test_unquantised_names_under_a_quantised_declaration_are_refused(
    bf16: Path, native: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="found unquantised, declared fp8_block128"):
        load(changed_copy(bf16, tmp_path / "x", config=quantization(native)))


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


@pytest.mark.parametrize("stated", [{}, {"expert_dtype": None}])
def test_expert_dtype_defaults_to_fp4(
    native: Path, tmp_path: Path, stated: dict[str, None]
) -> None:
    folder = changed_copy(native, tmp_path / "x", config={"expert_dtype": None})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **stated}))
    weights = load(folder)
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
        ({"expert_dtype": "fp6"}, "expert_dtype: found 'fp6', expected 'fp4' or 'fp8'"),
        (
            {"expert_dtype": "fp8"},
            "json: expert_dtype: found 'fp4', expected 'fp8' as in quantization_config",
        ),
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


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([], r"found \[\], expected an object"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo: found 'W4A8_AWQ', expected 'NVFP4' or"),
        ({"group_size": 32}, "group_size: found 32, expected 16"),
        ({"quantized_layers": {"x": 1}}, "quantized_layers: 'x': found 1, expected NVFP4"),
        ({"exclude_modules": "head"}, "exclude_modules: found 'head', expected a list"),
    ],
)
def test_what_is_wrong_in_the_separate_file_names_that_file(
    native: Path, tmp_path: Path, declared: object, message: str
) -> None:
    folder = changed_copy(native, tmp_path / "x")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    with pytest.raises(UserError, match=f"x/hf_quant_config.json: quantization: {message}"):
        load(folder)


@pytest.mark.parametrize("value", ["fp6", 4, ["fp4"]])
def test_unknown_expert_dtype_is_refused(native: Path, tmp_path: Path, value: object) -> None:
    folder = changed_copy(native, tmp_path / "x")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "expert_dtype": value}))
    with pytest.raises(UserError, match="expert_dtype: found"):
        load(folder)
