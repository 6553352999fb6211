"""The transformers hook against the engine: every value of the format agrees, and a fault in one
layer of the one side is found there, in the first value that it changes.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.layers.values import value_names
from dsv4.validate.cosine import main
from dsv4.validate.traces import write_engine_trace
from tests.hooks.loading import load_hook
from tests.model.oracle import random_oracle
from tests.model.tiny import random_ids, raw_config

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

pytestmark = pytest.mark.slow

TOKENS = random_ids(150)


class Sides(NamedTuple):
    """transformers' model, its checkpoint folder, and our trace of it."""

    oracle: "DeepseekV4ForCausalLM"
    folder: Path
    ours: Path


@pytest.fixture(scope="module")
def hook() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load_hook("transformers_trace", monkeypatch)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("oracle")
    oracle = random_oracle(raw_config((0, 4, 128, 4), 1))
    oracle.save_pretrained(folder)
    names = value_names_of(folder)
    config = EngineConfig(device="cpu", kv_dtype="bf16", compute_dtype="float32", max_context=256)
    write_engine_trace(folder / "ours.safetensors", folder, TOKENS, config, {}, names)
    return Sides(oracle, folder, folder / "ours.safetensors")


def value_names_of(folder: Path) -> list[str]:
    return value_names(ModelConfig.from_folder(folder))


def theirs(hook: ModuleType, sides: Sides, path: Path) -> Path:
    writer = hook.TraceWriter("transformers", sides.folder)
    hook.trace(sides.oracle, TOKENS, writer)
    return writer.save(path)


def test_every_value_of_the_format_agrees(
    hook: ModuleType, sides: Sides, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = theirs(hook, sides, tmp_path / "theirs.safetensors")
    json_file = tmp_path / "found.json"
    arguments = ["--trace", str(sides.ours), "--against", str(path), "--json", str(json_file)]
    assert main([*arguments, "--threshold", "0.999999"]) == 0
    out = capsys.readouterr().out
    assert "only in" not in out
    found = {row["name"] for row in json.loads(json_file.read_text())["rows"]}
    assert found == set(value_names_of(sides.folder))


Change = Callable[[Any], Tensor]
# The parameter that one layer of transformers has otherwise, and the first value to change.
FAULTS: dict[str, tuple[Change, str]] = {
    "attn_hc base": (lambda layer: layer.attn_hc.base[4:8], "attn_hc.post"),
    "input norm": (lambda layer: layer.input_layernorm.weight, "attn_hc.x"),
    "query projection": (lambda layer: layer.self_attn.q_b_proj.weight[0], "attn.q"),
    "key-value norm": (lambda layer: layer.self_attn.kv_norm.weight, "attn.kv"),
    "position bias": (lambda layer: layer.self_attn.compressor.position_bias, "attn.compressed"),
    "index weights": (
        lambda layer: layer.self_attn.compressor.indexer.scorer.weights_proj.weight,
        "indexer.weights",
    ),
    "index keys": (
        lambda layer: layer.self_attn.compressor.indexer.kv_norm.weight,
        "indexer.keys",
    ),
    "sinks": (lambda layer: layer.self_attn.sinks, "attn.heads"),
    "output projection": (lambda layer: layer.self_attn.o_b_proj.weight[0], "attn.output"),
    "ffn_hc base": (lambda layer: layer.ffn_hc.base[8:], "ffn_hc.comb"),
    "router bias": (lambda layer: layer.mlp.gate.e_score_correction_bias, "router.experts"),
    "router": (lambda layer: layer.mlp.gate.weight[0], "router.experts"),
    "shared expert": (lambda layer: layer.mlp.shared_experts.down_proj.weight, "ffn.output"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layer_is_found_there(
    fault: str, hook: ModuleType, sides: Sides, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    find, value = FAULTS[fault]
    with changed(find(sides.oracle.model.layers[1])):
        path = theirs(hook, sides, tmp_path / "theirs.safetensors")
    assert main(["--trace", str(sides.ours), "--against", str(path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"first under the threshold: layers.1.{value} (CSA), ")


@contextlib.contextmanager
def changed(parameter: Tensor) -> Iterator[None]:
    """Half of its values doubled and something added."""
    with torch.no_grad():
        before = parameter.clone()
        parameter.flatten()[::2].mul_(2)
        parameter.add_(torch.linspace(-0.5, 0.5, parameter.shape[-1]))
        yield
        parameter.copy_(before)
