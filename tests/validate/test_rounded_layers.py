"""Layers whose activations are rounded: the bits of the whole model, and a reference that rounds
alike.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Engine
from dsv4.checkpoint.layer_weights import StoredLayers
from dsv4.engine_config import ActivationMode
from dsv4.ops.tables import torch_table
from dsv4.validate.layer_walk import EngineLayers
from dsv4.validate.layers import main
from dsv4.validate.one_layer import Given, Values
from tests.validate.small_model import CONFIG, TOKENS

# Of 21 tokens one step rounds and one, of five, does not.
CHUNK = 16


def run_layers(model: Path, mode: ActivationMode) -> Values:
    """All layers of the model, whose experts are NVFP4 and everything else FP8."""
    source = StoredLayers(model)
    config = replace(CONFIG, prefill_activations=mode)
    side = EngineLayers(source, config, torch_table(mode), [torch.device("cpu")])
    shape = (len(TOKENS), source.config.hc_mult, source.config.hidden_size)
    streams_TME = source.embedding(TOKENS)[:, None].expand(shape)
    values: dict[str, torch.Tensor] = {}
    for layer in range(source.config.num_hidden_layers):
        values |= side.load(layer).run(Given(TOKENS, streams_TME), CHUNK)
        streams_TME = values[f"layers.{layer}.streams"]
    return values


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_rounded_layers_are_those_of_the_whole_model(model: Path, mode: ActivationMode) -> None:
    config = replace(CONFIG, prefill_chunk=CHUNK, prefill_activations=mode)
    whole = Engine.load(model, config).trace(TOKENS)
    for name, value in run_layers(model, mode).items():
        assert torch.equal(value, whole[name]), name


def test_every_mode_rounds_what_it_says(model: Path) -> None:
    exact, fp8, nvfp4 = (run_layers(model, mode) for mode in ("bf16", "fp8", "nvfp4"))
    query = "layers.0.attn.q"
    experts = "layers.0.ffn.output"
    assert not torch.equal(exact[query][:CHUNK], fp8[query][:CHUNK])
    assert torch.equal(fp8[query], nvfp4[query])
    assert not torch.equal(fp8[experts][:CHUNK], nvfp4[experts][:CHUNK])


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_the_reference_rounds_alike(
    model: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--device", "cpu", "--compute-dtype", "float32"]
    sizes = ["--tokens", "21", "--chunk", "21", "--chunk", str(CHUNK), "--chunk", "8"]
    rounding = ["--prefill-activations", mode, "--threshold", "0.99999"]
    assert main([*flags, *sizes, *rounding]) == 0, capsys.readouterr().out
