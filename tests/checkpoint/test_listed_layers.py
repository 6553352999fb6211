"""A list of some NVFP4 layers beside a declaration for all experts."""

from pathlib import Path

import pytest

from dsv4.checkpoint import open_checkpoint
from dsv4.errors import UserError
from tests.checkpoint.folders import changed_copy, load
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
