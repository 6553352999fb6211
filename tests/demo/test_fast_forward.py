"""The training forward equals transformers' own, so what it trains is that model."""

import pytest
import torch

from dsv4.demo import fast_forward, geometry
from dsv4.demo.fast_forward import Kernels, Options

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**{**geometry.CONFIG, "index_topk": 16, "hidden_size": 128})
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


@pytest.mark.parametrize("length", [128, 384])
def test_training_forward_equals_transformers(model, length: int) -> None:
    ids = torch.randint(0, 2048, (2, length))
    kernels = Kernels(fast_forward.plain_sinkhorn, fast_forward.block)
    options = Options(quantize_rows=False, select=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        ropes = fast_forward.rope_tables(model, length, "cpu")
        hidden, loads, _ = fast_forward.forward(model, ids, ropes, options, kernels)
    found = model.lm_head(hidden)
    assert (found - expected).abs().max() <= 5e-5 * expected.abs().max()
    assert torch.equal(loads.sum(-1), torch.full((6,), 2.0 * length * 6))
