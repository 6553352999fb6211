"""The SGLang hook on stubs with its names: the values are those that the model computes, and two
ranks are one."""

from pathlib import Path

import pytest
import torch

from dsv4.validate.names import suffix
from tests.hooks.loading import config_folder, load_hook, read_joined, stub_distributed
from tests.hooks.sglang_stub import HEADS, SCALE, VOCABULARY, DeepseekV4ForCausalLM

TOKENS = [3, 5, 7, 1, 0, 9]
SEAM = ("streams", "post", "comb", "x")
NAMES = {
    *(f"{sub}_hc.{part}" for sub in ("attn", "ffn") for part in SEAM),
    *("attn.q", "attn.output", "router.experts", "router.weights", "ffn.output", "streams"),
    *("hidden", "logits"),
}


def trace(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> list[Path]:
    """The files of one prompt in two chunks, after a pass that warms up."""
    for rank in range(ranks):
        stub_distributed("sglang.srt.distributed", rank, ranks, monkeypatch)
        hook = load_hook("sglang_trace", monkeypatch)
        path = str(folder / f"of{ranks}.safetensors")
        entry_class = hook.traced(DeepseekV4ForCausalLM, str(config_folder(folder / "model")), path)
        assert entry_class.__name__ == "DeepseekV4ForCausalLM"
        model = entry_class(rank, ranks)
        model(torch.zeros(4).long(), torch.zeros(4).long(), None)
        for first, last in ((0, 4), (4, 6)):
            model(torch.tensor(TOKENS[first:last]), torch.arange(first, last), None)
    return sorted(folder.glob(f"of{ranks}.*safetensors"))


def test_the_values_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_joined(trace(tmp_path, monkeypatch), TOKENS)
    assert {suffix(name) for name in found} == NAMES
    assert torch.equal(found["layers.0.streams"], found["layers.1.attn_hc.streams"])
    for seam in ("attn_hc", "ffn_hc"):
        x = found[f"layers.1.{seam}.x"]
        assert torch.allclose(found[f"layers.1.{seam}.streams"].mean(1), x)
    assert torch.allclose(found["layers.0.attn.output"], found["layers.0.attn_hc.x"] + 1)
    result = found["layers.0.ffn_hc.x"] * found["layers.0.router.weights"].sum(-1, keepdim=True)
    assert torch.allclose(found["layers.0.ffn.output"], result)
    # The second layer leaves the scale to the experts.
    result = found["layers.1.ffn_hc.x"] * found["layers.1.router.weights"].sum(-1, keepdim=True)
    assert torch.allclose(found["layers.1.ffn.output"] * SCALE, result)
    assert found["logits"].shape == (len(TOKENS), VOCABULARY)


def test_two_ranks_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = read_joined(trace(tmp_path, monkeypatch), TOKENS)
    two = read_joined(trace(tmp_path, monkeypatch, 2), TOKENS)
    assert two.keys() == one.keys()
    assert all(torch.equal(two[name], one[name]) for name in one.keys() - {"logits"})
    assert torch.allclose(two["logits"], one["logits"], atol=1e-6)
    assert one["layers.0.attn.q"].shape[1] == HEADS
