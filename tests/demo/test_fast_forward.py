"""The training forward equals transformers' own, so what it trains is that model."""

import copy
from typing import Any

import pytest
import torch

from dsv4.demo.training import fast_forward, geometry
from dsv4.demo.training.fast_attention import Options
from dsv4.demo.training.fast_forward import Kernels

transformers = pytest.importorskip("transformers")
SMALL = {"index_topk": 96, "hidden_size": 128, "vocab_size": 512, "num_hidden_layers": 3}
PLAIN = Kernels(fast_forward.plain_sinkhorn, fast_forward.block)


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights in every layer kind; 96 entries are all there are at 384 tokens, so no score
    ties decide.
    """
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**{**copy.deepcopy(geometry.CONFIG), **SMALL})
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("sinks", "position_bias", "hc_base", "base")):
                tensor.normal_()
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(tensor.shape[0], 16).argsort(-1)[:, :6])
            elif tensor.ndim >= 2:
                tensor.normal_(std=0.05)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 384])
def test_training_forward_equals_transformers(model: Any, length: int) -> None:
    ids = torch.randint(0, 512, (2, length))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        ropes = fast_forward.rope_tables(model, length, "cpu")
        hidden, loads, _ = fast_forward.forward(
            model, ids, ropes, Options(quantize_rows=False, select=True), PLAIN
        )
        found = model.lm_head(hidden)
    assert (found - expected).abs().max() <= 5e-5 * expected.abs().max()
    assert torch.equal(loads.sum(-1), torch.full((3,), 2.0 * length * 6))


@pytest.mark.slow
def test_the_indexers_loss_moves_the_indexer_only(model: Any) -> None:
    ids = torch.randint(0, 512, (1, 256))
    ropes = fast_forward.rope_tables(model, 256, "cpu")
    fast_forward.forward(model, ids, ropes, Options(index_loss=True), PLAIN)[2].backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    assert moved
    assert all(".indexer." in name for name in moved)
