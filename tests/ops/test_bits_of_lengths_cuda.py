"""The ops of a step give a token the same bits in decode steps of every length, in the shapes of
Flash.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.bench.decode_modes import fill_caches
from dsv4.checkpoint import geometry_config, synthetic_weights
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Block
from dsv4.ops import Ops
from dsv4.ops.immediate import immediate_ops
from dsv4.ops.tables import CUDA_TABLE
from dsv4.ops.trees import tensors_in
from dsv4.parallel.placement import Placement

pytestmark = pytest.mark.gpu

# Window, CSA and HCA.
LAYERS = (1, 2, 3)
POSITION = 9000


@pytest.fixture(scope="module")
def engine() -> Engine:
    raw = {**geometry_config("v4-flash", 4), "n_routed_experts": 32}
    config = ModelConfig.from_dict(raw)
    device = torch.device("cuda", 0)
    weights = synthetic_weights(config, "nvfp4-experts", 0, lambda _: device)
    settings = EngineConfig(device="cuda", max_context=16384, prefill_chunk=512)
    found = Engine(config, settings, weights, Placement.of_layers([device] * 4), CUDA_TABLE)
    fill_caches(found.state)
    return found


@pytest.fixture(scope="module")
def ops() -> Ops:
    return immediate_ops(CUDA_TABLE)


def random_rows(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((MAX_DECODE_TOKENS, *shape), generator=generator, device="cuda").bfloat16()


def lengths_that_differ(call: Callable[..., Any], *rows: Tensor) -> list[int]:
    """Tokens of a step of which one has other bits than by itself."""

    def run(first: int, last: int) -> list[Tensor]:
        found = call(*(tensor[first:last].clone() for tensor in rows))
        return [tensor.clone() for tensor in tensors_in(found)]

    single = [run(token, token + 1) for token in range(MAX_DECODE_TOKENS)]
    expected = [torch.cat(parts) for parts in zip(*single, strict=True)]
    differ = []
    for tokens in range(2, MAX_DECODE_TOKENS + 1):
        pairs = zip(run(0, tokens), expected, strict=True)
        if not all(torch.equal(found, whole[:tokens]) for found, whole in pairs):
            differ.append(tokens)
    return differ


def calls_of(engine: Engine, ops: Ops, block: Block, layer: int) -> dict[str, list[int]]:
    """The lengths that differ, by op."""
    attn = block.attn
    config = engine.config
    x = random_rows(config.hidden_size)
    streams = random_rows(config.hc_mult, config.hidden_size, seed=2)
    _, post, comb = ops.hc_pre(streams, block.attn_hc.weights, block.attn_hc.norm)
    mixing = (streams, post.clone(), comb.clone())
    heads = config.num_attention_heads * config.head_dim // config.o_groups
    ffn = block.ffn_hc
    return {
        "hc_pre": lengths_that_differ(
            lambda s: ops.hc_pre(s, block.attn_hc.weights, block.attn_hc.norm), streams
        ),
        "hc_seam": lengths_that_differ(
            lambda y, s, p, c: ops.hc_seam(y, s, p, c, ffn.weights, ffn.norm), x, *mixing
        ),
        "hc_post": lengths_that_differ(lambda *all_of: ops.hc_post(*all_of), x, *mixing),
        "input rows": lengths_that_differ(lambda v: ops.linear_rows(v, attn.input_rows), x),
        "query rows": lengths_that_differ(
            lambda v: ops.linear_rows(v, attn.query_rows, attn.q_norm, 1e-6),
            random_rows(config.q_lora_rank),
        ),
        "wo_a": lengths_that_differ(
            lambda v: ops.grouped_linear(v, attn.wo_a), random_rows(config.o_groups, heads)
        ),
        "wo_b": lengths_that_differ(
            lambda v: ops.linear(v, attn.wo_b),
            random_rows(config.o_groups * config.o_lora_rank),
        ),
        "attention": _attention(engine, ops, block, layer),
        "experts": lengths_that_differ(
            lambda v, t: ops.moe(
                v, t, block.ffn.router, block.ffn.experts, block.ffn.shared, block.ffn.swiglu_limit
            ),
            *(x, torch.arange(MAX_DECODE_TOKENS, device="cuda")),
        ),
    }


def _attention(engine: Engine, ops: Ops, block: Block, layer: int) -> list[int]:
    config = engine.config
    attn = block.attn
    keys = engine.state.layers[layer].keys
    q = random_rows(config.num_attention_heads, config.head_dim)
    positions = torch.arange(POSITION, POSITION + MAX_DECODE_TOKENS, device="cuda")
    inv_freq = attn.norm.inv_freq
    if config.compress_ratios[layer] != 4:
        return lengths_that_differ(
            lambda v, p: ops.sparse_attention(v, keys, None, attn.sink_H, p, inv_freq), q, positions
        )
    chosen = torch.stack([torch.randperm(2200, device="cuda")[: config.index_topk] for _ in q])
    return lengths_that_differ(
        lambda v, s, p: ops.sparse_attention(v, keys, s, attn.sink_H, p, inv_freq),
        *(q, chosen, positions),
    )


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_ops_of_a_layer_give_a_token_the_same_bits(engine: Engine, ops: Ops, layer: int) -> None:
    found = calls_of(engine, ops, engine.model.blocks[layer], layer)
    assert {name: differ for name, differ in found.items() if differ} == {}


@torch.inference_mode()
def test_a_token_selects_the_same_list(engine: Engine, ops: Ops) -> None:
    """In the same order, in which attention sums."""
    config = engine.config
    index = engine.state.layers[2].index
    assert index is not None
    q = random_rows(config.index_n_heads, config.index_head_dim)
    weight = random_rows(config.index_n_heads, seed=2).float()
    positions = torch.arange(POSITION, POSITION + MAX_DECODE_TOKENS, device="cuda")

    def select(q_TID: Tensor, weight_TI: Tensor, positions_T: Tensor) -> Tensor:
        keys = (0.01, index.rows, positions_T, config.index_topk)
        return ops.index_select(q_TID, weight_TI, *keys)

    assert lengths_that_differ(select, q, weight, positions) == []


@torch.inference_mode()
def test_both_products_of_the_head_give_a_token_the_same_bits(engine: Engine, ops: Ops) -> None:
    head = engine.model.head
    config = engine.config
    streams = random_rows(config.hc_mult, config.hidden_size)
    assert lengths_that_differ(lambda s: ops.hc_head(s, head.collapse, head.norm), streams) == []
    x = random_rows(config.hidden_size)
    assert lengths_that_differ(lambda v: ops.linear(v, head.lm_head, torch.float32), x) == []
