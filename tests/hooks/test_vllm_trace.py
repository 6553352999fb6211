"""The vLLM hook on stubs with its names: the values are those that the model computes, and two
ranks are one."""

from pathlib import Path

import pytest
import torch

from dsv4.layers.values import LAYER_VALUES
from dsv4.ops.rope import rope
from dsv4.validate.names import suffix
from tests.hooks.loading import config_folder, load_hook, read_joined, stub_distributed
from tests.hooks.vllm_stub import HEADS, DeepseekV4ForCausalLM, mhc_post_tilelang

TOKENS = [3, 5, 7, 1, 0, 9]
IN_KERNELS = {
    *("attn_hc.post", "attn_hc.comb", "attn.compressed"),
    *("indexer.q", "indexer.keys", "indexer.scores"),
}


def trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, mega: bool = False
) -> list[Path]:
    """The files of one prompt in two chunks, after a pass that warms up."""
    for rank in range(ranks):
        stub_distributed("vllm.distributed", rank, ranks, monkeypatch)
        hook = load_hook("vllm_trace", monkeypatch)
        model = DeepseekV4ForCausalLM(rank, ranks, mega, rank == 0)
        path = str(folder / f"of{ranks}.safetensors")
        hook.install(model, str(config_folder(folder / "model")), path)
        model(input_ids=torch.zeros(4, dtype=torch.int32), positions=torch.zeros(4).long())
        for first, last in ((0, 4), (4, 6)):
            ids = torch.tensor(TOKENS[first:last], dtype=torch.int32)
            model(input_ids=ids, positions=torch.arange(first, last))
    return sorted(folder.glob(f"of{ranks}.*safetensors"))


def test_every_value_that_exists_outside_of_kernels_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_joined(trace(tmp_path, monkeypatch), TOKENS)
    assert {suffix(name) for name in found} == {*LAYER_VALUES, "hidden", "logits"} - IN_KERNELS
    assert found["layers.1.indexer.entries"].tolist() == [[-1] * 3] * 4 + [[0] * 3] * 2
    mixed = mhc_post_tilelang(
        found["layers.0.ffn.output"],
        found["layers.0.ffn_hc.streams"],
        found["layers.0.ffn_hc.post"].unsqueeze(-1),
        found["layers.0.ffn_hc.comb"],
    )
    assert torch.allclose(found["layers.0.streams"], mixed)
    assert torch.allclose(found["layers.1.attn_hc.x"], mixed.mean(1))
    q = found["layers.0.attn.q"]
    inv_freq = torch.tensor([1.0, 0.1])
    positions = torch.arange(len(TOKENS))
    assert torch.allclose(
        found["layers.0.attn.heads"], rope(2 * q, positions, inv_freq, inverse=True), atol=1e-6
    )
    kv = rope(q[:, :1], positions, inv_freq).squeeze(1)
    assert torch.allclose(found["layers.0.attn.kv"], kv, atol=1e-6)


@pytest.mark.parametrize("mega", [False, True])
def test_two_ranks_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mega: bool) -> None:
    one = read_joined(trace(tmp_path, monkeypatch, mega=mega), TOKENS)
    paths = trace(tmp_path, monkeypatch, 2, mega)
    assert [path.name for path in paths] == ["of2.rank0.safetensors", "of2.rank1.safetensors"]
    two = read_joined(paths, TOKENS)
    assert two.keys() == one.keys()
    assert all(torch.equal(two[name], one[name]) for name in one)
    assert one["layers.0.attn.q"].shape[1] == HEADS
    assert one["layers.0.router.experts"].shape == (len(TOKENS), 2)
