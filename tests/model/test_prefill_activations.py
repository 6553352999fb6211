"""Quantised activations in a whole model: only prompts have them, and chunks do not matter."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.engine_config import ActivationMode
from dsv4.errors import UserError
from dsv4.layers.weights import Weights
from dsv4.ops.quantize_activations import hidden_global_scale, quantize_nvfp4
from dsv4.parallel.devices import table_on
from dsv4.parallel.placement import Placement
from dsv4.weights.parameters import Role, parameters
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.model.tiny import CPU, random_ids, random_weights, small_config

IDS = random_ids(40)
FORMATS = {Role.EXPERT: QuantFormat.NVFP4, Role.LINEAR: QuantFormat.FP8_BLOCK128}


def quantised_weights(config: ModelConfig) -> Weights:
    """NVFP4 experts and FP8 projections, as the released checkpoints."""
    found: dict[str, QuantTensor | Tensor] = {}
    roles = {name: parameter.role for name, parameter in parameters(config).items()}
    for name, weight in random_weights(config).items():
        format = FORMATS.get(roles[name])
        assert isinstance(weight, QuantTensor | Tensor)
        if isinstance(weight, QuantTensor) and format is not None:
            weight = quantize(weight.dequantize(), format)
        found[name] = weight
    return found


def logits(mode: ActivationMode, chunks: list[int]) -> Tensor:
    raw = small_config()
    config = ModelConfig.from_dict(raw)
    engine_config = EngineConfig(
        device="cpu",
        kv_dtype="bf16",
        compute_dtype="float32",
        max_context=64,
        prefill_activations=mode,
    )
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    table = table_on(engine_config, [CPU])
    engine = Engine(config, engine_config, quantised_weights(config), placement, table)
    return engine.logits(IDS, chunks)


def distance(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_prompts_are_rounded_and_chunks_do_not_matter(mode: ActivationMode) -> None:
    exact = logits("bf16", [40])
    rounded = logits(mode, [40])
    moved = distance(rounded, exact)
    assert 0.005 < moved < 0.3
    # Sums in another order may round a value the other way here and there.
    assert distance(logits(mode, [20, 20]), rounded) < 0.1 * moved


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_decode_steps_are_not_rounded(mode: ActivationMode) -> None:
    assert torch.equal(logits(mode, [8] * 5), logits("bf16", [8] * 5))


def test_a_limit_that_takes_small_hidden_values_is_refused(tmp_path: Path) -> None:
    """A row of ones has zeros only, with the scale of a limit of 1000."""
    ones = torch.ones(1, 64)
    assert not quantize_nvfp4(ones, hidden_global_scale(1000.0, 2.5)).dequantize().any()
    assert quantize_nvfp4(ones, hidden_global_scale(32.0, 2.5)).dequantize().all()
    for limit in (32.0, 1000.0):
        raw = tiny_config(swiglu_limit=limit, routed_scaling_factor=2.5)
        for layout in ("native", "nvfp4-experts"):
            write_synthetic(tmp_path / f"{layout} {limit:g}", raw, layout, 0)
    engine = EngineConfig(device="cpu", prefill_activations="nvfp4")
    for accepted in ("nvfp4-experts 32", "native 1000"):
        Engine.plan(tmp_path / accepted, engine)
    refused = tmp_path / "nvfp4-experts 1000"
    expected = "found 1000, expected at most 32.8 (for routing weights up to 2.5) with"
    with pytest.raises(UserError, match=re.escape(f"config.json: swiglu_limit: {expected}")):
        Engine.plan(refused, engine)
    Engine.plan(refused, EngineConfig(device="cpu", prefill_activations="fp8"))


def test_the_shared_expert_has_weight_1_whatever_routing_weights_are(tmp_path: Path) -> None:
    raw = tiny_config(swiglu_limit=60.0, routed_scaling_factor=0.5)
    write_synthetic(tmp_path / "model", raw, "nvfp4-all", 0)
    expected = "swiglu_limit: found 60, expected at most 51.8 (for routing weights up to 1) with"
    with pytest.raises(UserError, match=re.escape(expected)):
        Engine.plan(tmp_path / "model", EngineConfig(device="cpu", prefill_activations="nvfp4"))
