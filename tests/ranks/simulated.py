"""Engines whose ranks are simulated on the CPU, and what their caches hold."""

from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.caches.filled import filled_rows
from dsv4.layers.weights import Weights
from dsv4.ops import TORCH, Ops
from dsv4.parallel.placement import Placement
from dsv4.weights.quant import QuantTensor
from tests.model.tiny import CPU, direct, random_weights, raw_config
from tests.ranks.cut_weights import rank_weights

# Every kind of layer, with hashed and with learned routing; groups for four ranks. A vocabulary of
# 89 gives the ranks different numbers of rows.
RATIOS = (0, 4, 128, 0, 4, 128)
RAW: dict[str, Any] = raw_config(
    RATIOS,
    hash_layers=3,
    num_attention_heads=8,
    o_groups=4,
    qk_rope_head_dim=16,
    index_n_heads=16,
    hc_sinkhorn_iters=3,
)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "kv_dtype": "bf16",
    "compute_dtype": "float32",
    "max_context": 320,
    "prefill_chunk": 160,
}


def ranks_engine(
    ranks: int,
    ops: Ops = TORCH,
    raw: dict[str, Any] | None = None,
    weights: Weights | None = None,
    **settings: Any,
) -> Engine:
    """An engine of ``ranks`` ranks with the parts of the same (random) weights."""
    config = ModelConfig.from_dict(raw or RAW)
    found = random_weights(config) if weights is None else weights
    whole = {n: one for n, one in found.items() if isinstance(one, QuantTensor | Tensor)}
    parts = [rank_weights(whole, config, ranks, rank) for rank in range(ranks)]
    placement = Placement.tensor(config.num_hidden_layers, (CPU,) * ranks)
    engine = EngineConfig(**{**SETTINGS, **settings})
    return Engine(config, engine, parts, placement, direct(ops))


def caches(engine: Engine, rank: int) -> dict[str, Tensor]:
    """Every row that a later step of a rank can read, by name."""
    state = engine.state
    rows = filled_rows(state.ranks[rank].layers, state.position, state.undoable_tokens)
    return {
        f"{one.name} part {index}": part for one in rows for index, part in enumerate(one.parts())
    }


def different_caches(engine: Engine, expected: Engine) -> list[str]:
    """Names of the rows of any rank that are not, bit for bit, those of ``expected``'s rank 0."""
    wanted = caches(expected, 0)
    found = []
    for rank in range(len(engine.state.ranks)):
        rows_by_name = caches(engine, rank)
        assert rows_by_name.keys() == wanted.keys()
        found += [
            f"rank {rank} {name}"
            for name, rows in rows_by_name.items()
            if not torch.equal(rows.view(torch.uint8), wanted[name].view(torch.uint8))
        ]
    return found
