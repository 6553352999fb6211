"""Folders written by transformers load here, and folders written here load there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.export import export
from dsv4.config import ModelConfig
from dsv4.weights.quant import QuantTensor
from tests.checkpoint.folders import as_bytes, load, read_tensors

pytestmark = pytest.mark.slow

GEOMETRY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 2,
    "sliding_window": 16,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hybrid`` is what ``save_pretrained`` writes, ``hf`` the same model in module names."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    folder = tmp_path_factory.mktemp("transformers")
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**GEOMETRY))
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], 8).argsort(-1)[:, : buffer.shape[1]])
    model.save_pretrained(folder / "hybrid")
    model.save_pretrained(folder / "hf", save_original_format=False)
    return folder


def test_both_dialects_that_transformers_writes_load_the_same_weights(saved: Path) -> None:
    names = read_tensors(saved / "hybrid")
    assert "model.layers.1.attn.norm.weight" in names
    assert "head.weight" in names
    hybrid = load(saved / "hybrid")
    hf = load(saved / "hf")
    assert {name: as_bytes(weight) for name, weight in hybrid.items()} == {
        n: as_bytes(w) for n, w in hf.items()
    }
    config = ModelConfig.from_folder(saved / "hybrid")
    assert config.compress_ratios == (0, 4, 128, 4)
    assert config.hash_layers == (True, True, False, False)


@pytest.mark.parametrize("source", ["hybrid", "hf"])
def test_exported_module_names_are_what_transformers_loads(
    saved: Path, source: str, tmp_path: Path
) -> None:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    export(saved / source, tmp_path / "x", "bf16", Dialect.HF)
    loading = {"dtype": torch.float32, "output_loading_info": True}
    result: Any = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "x", **loading)
    model, report = result
    assert not any(
        report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    expected = read_tensors(saved / "hf")
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    kept_in_float32 = (
        "attn_hc",
        "ffn_hc",
        "hc_head",
        "sinks",
        "position_bias",
        "e_score_correction_bias",
    )
    for name, tensor in expected.items():
        exact = any(part in name for part in kept_in_float32) or not tensor.is_floating_point()
        assert torch.equal(loaded[name], tensor if exact else tensor.bfloat16().float()), name


def test_quantised_export_of_a_transformers_model_loads(saved: Path, tmp_path: Path) -> None:
    export(saved / "hybrid", tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    before = load(saved / "hybrid")
    after = load(tmp_path / "x")
    for name, weight in before.items():
        loaded = after[name]
        if isinstance(weight, QuantTensor):
            assert isinstance(loaded, QuantTensor)
            error = (loaded.dequantize() - weight.dequantize()).norm() / weight.dequantize().norm()
            assert float(error) < 0.15, name
