"""The values of a trace against what the sublayers compute of those in front of them."""

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.ops import TORCH
from dsv4.weights.quant import QuantTensor
from tests.model.tiny import random_ids, random_weights, tiny_engine

TOKENS = 22
IDS = random_ids(TOKENS)
LAYERS = range(4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=32, prefill_chunk=32)


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    """Of chunks and of single tokens."""
    return tiny_engine(max_context=32, prefill_chunk=8).trace(IDS, prompt_tokens=18)


@pytest.mark.parametrize("layer", LAYERS)
def test_attention_of_x_gives_what_is_traced(
    engine: Engine, values: dict[str, Tensor], layer: int
) -> None:
    attn = engine.model.blocks[layer].attn
    state = engine.state.layers[layer]
    with torch.inference_mode():
        projections = attn.project(TORCH, values[f"layers.{layer}.attn_hc.x"])
        attended = attn.attend(TORCH, projections, torch.arange(TOKENS), state)
    expected = {
        "attn.q": attended.queries.q_THD,
        "attn.heads": attended.heads_THD,
        "attn.output": attended.y_TE,
    }
    complete = torch.arange(TOKENS // state.keys.ratio if state.keys.ratio else 0)
    if state.compressed is not None:
        expected["attn.compressed"] = state.compressed.rows.read(complete)
    if state.index is not None:
        assert attended.selection is not None
        assert attended.queries.index_TID is not None
        expected["indexer.q"] = attended.queries.index_TID
        expected["indexer.weights"] = attended.selection.weight_TI
        expected["indexer.keys"] = state.index.rows.read(complete)
    assert_traced(values, layer, expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_experts_of_x_give_what_is_traced(
    engine: Engine, values: dict[str, Tensor], layer: int
) -> None:
    with torch.inference_mode():
        mixture = engine.model.blocks[layer].ffn(
            TORCH, values[f"layers.{layer}.ffn_hc.x"], torch.tensor(IDS)
        )
    expected = {
        "router.experts": mixture.ids_TP,
        "router.weights": mixture.weights_TP,
        "ffn.output": mixture.y_TE,
    }
    assert_traced(values, layer, expected)


def test_the_head_of_hidden_states_gives_the_logits(
    engine: Engine, values: dict[str, Tensor]
) -> None:
    head = random_weights(engine.config)["head.weight"]
    assert isinstance(head, QuantTensor)
    expected = values["hidden"] @ head.dequantize().T
    torch.testing.assert_close(values["logits"], expected, rtol=1e-4, atol=1e-5)


def assert_traced(values: dict[str, Tensor], layer: int, expected: dict[str, Tensor]) -> None:
    for name, rows in expected.items():
        found = values[f"layers.{layer}.{name}"]
        assert found.shape == rows.shape, name
        if rows.is_floating_point():
            torch.testing.assert_close(found, rows, rtol=1e-4, atol=1e-4, check_dtype=False)
        else:
            assert found.tolist() == rows.tolist(), name
