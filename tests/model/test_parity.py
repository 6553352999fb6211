"""Our model against transformers' on random tiny models of every layer kind, through the real
checkpoint loader.

Bound: 5e-5 of the largest reference value, for the streams after every block and for the logits;
measured errors are below 3e-6. A near tie between two experts or two index entries goes either way
by rounding, so that another CPU would read another model. The seeds of the prompts are such that
every choice is decided by more than 1e-4 of the token's largest score, which is tested with them;
the closest is decided by 1.45e-4.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.ops import TORCH, Ops
from dsv4.ops.moe import Mixture
from dsv4.ops.rope import query_rope
from dsv4.ops.router import Router
from dsv4.validate.traces import block_trace
from tests.model.clear_choices import ClearChoices
from tests.model.oracle import load_saved, oracle_trace, random_oracle, relative_error
from tests.model.parts import with_parts
from tests.model.tiny import random_ids, raw_config

BOUND = 5e-5
CLEAR = 1e-4

# Compression ratios, layers that route by hash, seed of the prompt.
LAYER_KINDS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "sliding window only": ((0, 0), 0, 3),
    "csa only": ((4, 4), 0, 36),
    "hca only": ((128, 128), 0, 0),
    "hash routing only": ((0, 4), 2, 2),
    "every kind": ((0, 4, 128, 4, 128), 2, 28),
    "kinds in another order": ((128, 4, 4, 0), 1, 38),
}
# What differs, seed of the prompt.
GEOMETRIES: dict[str, tuple[dict[str, Any], int]] = {
    "head_dim 128, rope 64, 4 groups": (
        {
            "head_dim": 128,
            "qk_rope_head_dim": 64,
            "o_groups": 4,
            "index_head_dim": 64,
            "hidden_size": 96,
            "num_attention_heads": 8,
        },
        16,
    ),
    "head_dim 512, rope 64, index 128, top-6 of 16": (
        {
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "num_experts_per_tok": 6,
            "n_routed_experts": 16,
            "hidden_size": 128,
        },
        44,
    ),
    "without YaRN": ({"rope_scaling": {"type": "default"}}, 27),
    "window 16, top-2 entries, two streams": (
        {"sliding_window": 16, "index_topk": 2, "hc_mult": 2},
        5,
    ),
    "window 100, entries for all": ({"sliding_window": 100, "index_topk": 512}, 2),
    "one expert, one group, loose clamp": (
        {"num_experts_per_tok": 1, "o_groups": 1, "swiglu_limit": 10.0},
        42,
    ),
}
# Lengths of prompts, and the seed of each.
LENGTHS: dict[int, int] = dict(
    zip(
        (1, 2, 3, 4, 5, 7, 8, 9, 126, 127, 128, 129, 130, 254, 255, 256, 257, 258),
        (1, 2, 3, 4, 5, 7, 8, 9, 126, 128, 132, 134, 136, 262, 265, 275, 278, 283),
        strict=True,
    )
)


def compared(
    raw: dict[str, Any], folder: Path, seeds: dict[int, int], ops: Ops = TORCH
) -> tuple[float, float]:
    """Over prompts of these lengths and seeds: the largest relative error of any block, the final
    hidden state and the logits, and our closest choice.
    """
    oracle = random_oracle(raw)
    choices = ClearChoices(ops)
    engine = load_saved(oracle, folder, choices.ops, prefill_chunk=4096, max_context=4096)
    worst = 0.0
    for length, seed in seeds.items():
        token_ids = random_ids(length, raw["vocab_size"], seed)
        found = tensors(block_trace(engine, token_ids))
        expected = tensors(oracle_trace(oracle, token_ids))
        worst = max(
            worst,
            *(relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)),
        )
    return worst, choices.closest


def assert_match(raw: dict[str, Any], folder: Path, seeds: dict[int, int]) -> None:
    error, closest = compared(raw, folder, seeds)
    assert closest > CLEAR
    assert error <= BOUND


def tensors(trace: dict[str, Tensor | list[Tensor]]) -> list[Tensor]:
    """Streams after each block, final hidden state, logits."""
    return [
        *trace["layers"],
        *(part for part in (trace["final"], trace["logits"]) if isinstance(part, Tensor)),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "every kind" else pytest.mark.slow)
        for kind in LAYER_KINDS
    ],
)
def test_every_layer_kind_matches_transformers(kind: str, tmp_path: Path) -> None:
    ratios, hash_layers, seed = LAYER_KINDS[kind]
    assert_match(raw_config(ratios, hash_layers), tmp_path, {300: seed})


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_other_geometries_match_transformers(geometry: str, tmp_path: Path) -> None:
    changes, seed = GEOMETRIES[geometry]
    assert_match(raw_config((0, 4, 128, 4), 1, **changes), tmp_path, {300: seed})


@pytest.mark.slow
def test_prompt_lengths_around_every_boundary_match_transformers(tmp_path: Path) -> None:
    assert_match(raw_config(), tmp_path, LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "seed", "index_topk"), [(513, 96, 16), (2058, 92, 512)])
def test_long_prompts_match_transformers(
    length: int, seed: int, index_topk: int, tmp_path: Path
) -> None:
    # With index_topk 512 the indexer has to leave entries out from token 2052 on.
    assert_match(raw_config((4, 128), 0, index_topk=index_topk), tmp_path, {length: seed})


def without_sink(
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    return TORCH.sparse_attention(q_THD, keys, selected_TK, sink_H - 1e9, positions_T, inv_freq)


def transposed_mixing(streams_TME: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    x_TE, post_TM, comb_TMM = TORCH.hc_pre(streams_TME, *parameters)
    return x_TE, post_TM, comb_TMM.transpose(1, 2)


def transposed_seam(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams_TME, x_TE, post_TM, comb_TMM = TORCH.hc_seam(*operands)
    return streams_TME, x_TE, post_TM, comb_TMM.transpose(1, 2)


def worst_entries(q_TID: Tensor, weight_TI: Tensor, *rest: Any) -> Tensor:
    return TORCH.index_select(q_TID, -weight_TI, *rest)


def head_with_large_eps(streams_TME: Tensor, weights: Any, norm_weight: Tensor) -> Tensor:
    return TORCH.hc_head(streams_TME, dataclasses.replace(weights, hc_eps=1e-2), norm_weight)


def unscaled_queries(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
    return query_rope(q_THD, positions_T, inv_freq, eps + 1.0)


def unclamped(x: Any, tokens: Any, router: Any, experts: Any, shared: Any, _: float) -> Mixture:
    return TORCH.moe(x, tokens, router, experts, shared, 1e9)


def unbiased_routes(x_TE: Tensor, tokens_T: Tensor, router: Router, *rest: Any) -> Mixture:
    if not router.hashed:
        router = dataclasses.replace(router, selection=torch.zeros_like(router.selection))
    return TORCH.moe(x_TE, tokens_T, router, *rest)


def reversed_table(x_TE: Tensor, tokens_T: Tensor, router: Router, *rest: Any) -> Mixture:
    if router.hashed:
        router = dataclasses.replace(router, selection=router.selection.flip(0))
    return TORCH.moe(x_TE, tokens_T, router, *rest)


def groups_swapped(x_TGK: Tensor, weight: Any) -> Tensor:
    return TORCH.grouped_linear(x_TGK.flip(1), weight)


MUTATIONS: list[tuple[str, Callable[..., Any]]] = [
    ("sparse_attention", without_sink),
    ("hc_pre", transposed_mixing),
    ("hc_seam", transposed_seam),
    ("index_select", worst_entries),
    ("moe", unclamped),
    ("moe", unbiased_routes),
    ("moe", reversed_table),
    ("grouped_linear", groups_swapped),
    ("hc_head", head_with_large_eps),
    ("prepare_attention", with_parts(query_rope=unscaled_queries).prepare_attention),
    ("prepare_attention", with_parts(index_query=lambda q_TID, *rest: q_TID).prepare_attention),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "mutation"), MUTATIONS)
def test_parity_notices_a_wrong(op: str, mutation: Callable[..., Any], tmp_path: Path) -> None:
    wrong = dataclasses.replace(TORCH, **{op: mutation})
    error, _ = compared(raw_config(), tmp_path, {300: 69}, wrong)
    assert error > 10 * BOUND


@pytest.mark.slow
def test_that_prompt_matches_with_the_right_ops(tmp_path: Path) -> None:
    assert_match(raw_config(), tmp_path, {300: 69})
