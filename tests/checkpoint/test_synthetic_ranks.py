"""Random weights drawn rank by rank: the shapes of parts, equal bytes where ranks must agree."""

import math
from typing import get_args

import pytest
import torch

from dsv4.checkpoint import Layout, synthetic_rank_weights, synthetic_weights, tiny_config
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.parallel.sharding import cut_of, local_parameters
from dsv4.weights.parameters import parameters
from dsv4.weights.quant import QuantTensor
from tests.checkpoint.folders import CPU, as_bytes

CONFIG = ModelConfig.from_dict(
    tiny_config(num_attention_heads=8, o_groups=4, moe_intermediate_size=256, vocab_size=250)
)
RANKS = 4


@pytest.mark.parametrize("layout", get_args(Layout))
def test_ranks_differ_where_they_are_cut_and_nowhere_else(layout: Layout) -> None:
    held = [
        synthetic_rank_weights(CONFIG, layout, 3, CPU, RANKS, rank, "classic")
        for rank in range(RANKS)
    ]
    for rank, weights in enumerate(held):
        local = local_parameters(CONFIG, RANKS, rank, "classic")
        shapes = {name: one.shape for name, one in local.items()}
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    for name, parameter in parameters(CONFIG, "classic").items():
        distinct = {str(as_bytes(weights[name])) for weights in held}
        assert len(distinct) == (1 if cut_of(parameter, RANKS, 0) is None else RANKS), name


@pytest.mark.parametrize("layout", ["nvfp4-all", "bf16"])
def test_values_are_as_large_as_those_of_the_whole(layout: Layout) -> None:
    """A part of the columns has fewer inputs, but the sum over the ranks has all of them."""
    weights = synthetic_rank_weights(CONFIG, layout, 3, CPU, RANKS, 1)
    whole = synthetic_weights(CONFIG, layout, 3, lambda _: CPU)
    for name in ("layers.1.ffn.experts.w2.weight", "layers.1.attn.wo_b.weight"):
        part, all_of_it = weights[name], whole[name]
        assert isinstance(part, QuantTensor)
        assert isinstance(all_of_it, QuantTensor)
        found = part.dequantize().std() / all_of_it.dequantize().std()
        assert math.isclose(found, 1, abs_tol=0.15), name


def test_one_rank_draws_what_is_drawn_without_ranks() -> None:
    whole = synthetic_weights(CONFIG, "native", 3, lambda _: CPU)
    for name, weight in synthetic_rank_weights(CONFIG, "native", 3, CPU, 1, 0).items():
        assert as_bytes(weight) == as_bytes(whole[name])


def test_a_model_that_cannot_be_cut_is_not_drawn() -> None:
    with pytest.raises(UserError, match=r"found 8 .*expected 2 or 4 \(o_groups is 4\)"):
        synthetic_rank_weights(CONFIG, "native", 3, torch.device("meta"), 8, 0)
