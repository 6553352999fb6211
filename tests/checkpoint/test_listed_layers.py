"""Lists of modules: of some NVFP4 layers beside a declaration for all experts, and of what is not
quantised.
"""

import json
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Dialect, open_checkpoint, tiny_config, write_synthetic
from dsv4.errors import UserError
from dsv4.weights.quant import QuantFormat
from tests.checkpoint.folders import Tensors, changed_copy, load, matrix
from tests.checkpoint.test_declarations import quantization, without_hf_quant_config


def test_listed_layers_are_all_that_are_nvfp4(nvfp4_experts: Path, tmp_path: Path) -> None:
    """Whatever ``moe_quant_algo`` says beside the list."""
    layers = open_checkpoint(nvfp4_experts).raw_config["quantization_config"]["quantized_layers"]
    listed = {"layers.0.ffn.experts": layers["layers.0.ffn.experts"]}
    config = quantization(nvfp4_experts, quantized_layers=listed, moe_quant_algo="NVFP4")
    folder = without_hf_quant_config(changed_copy(nvfp4_experts, tmp_path / "x", config=config))
    expected = r"layers.1.ffn.experts.0.w1 \(found nvfp4, declared mxfp4\)"
    with pytest.raises(UserError, match=expected):
        load(folder)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_modules_not_to_convert_may_be_named_in_hf_names(tmp_path: Path, prefix: str) -> None:
    write_synthetic(tmp_path / "a", tiny_config(), "native", 1, names=Dialect.HF)
    name = "model.layers.0.mlp.shared_experts.down_proj"

    def edit(tensors: Tensors) -> None:
        del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{name}.weight"] = torch.ones(128, 64)

    listed = prefix + name.removeprefix("model.")
    config = quantization(tmp_path / "a", modules_to_not_convert=[listed])
    weights = load(changed_copy(tmp_path / "a", tmp_path / "b", edit, config))
    assert matrix(weights, "layers.0.ffn.shared_experts.w2.weight").format is QuantFormat.F32


def test_of_two_lists_of_one_key_that_of_config_json_counts(native: Path, tmp_path: Path) -> None:
    name = "layers.1.attn.wo_a"

    def edit(tensors: Tensors) -> None:
        del tensors[f"{name}.scale"]
        tensors[f"{name}.weight"] = torch.ones(128, 256, dtype=torch.bfloat16)

    lists = (["head", name], ["head"])
    for number, (main, separate) in enumerate((lists, lists[::-1])):
        config = quantization(native, exclude_modules=main)
        folder = changed_copy(native, tmp_path / str(number), edit, config)
        declared = {"quantization": {"exclude_modules": separate}}
        (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    assert matrix(load(tmp_path / "0"), f"{name}.weight").format is QuantFormat.BF16
    with pytest.raises(UserError, match=rf"{name} \(found unquantised, declared fp8_block128\)"):
        load(tmp_path / "1")
