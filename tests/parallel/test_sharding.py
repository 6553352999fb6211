"""What a rank holds: everything once or whole, in the shapes of a smaller model, or one line that
says why not.
"""

import dataclasses
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.checkpoint import Layout, geometry_config, synthetic_weights, tiny_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.errors import UserError
from dsv4.parallel.sharding import (
    HEAD,
    HEAD_ROWS,
    RANKS,
    check_divisible,
    cut_of,
    local_config,
    local_parameters,
)
from dsv4.weights.cut import COLUMNS, ROWS
from dsv4.weights.parameters import Parameter, parameters
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ranks.cut_weights import rank_weights

CPU = torch.device("cpu")
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
# The cut parameters, written out: rows or columns of what.
CUT = {
    ROWS: ("attn.wq_b", "attn.wo_a", "experts.w1", "experts.w3", "head"),
    COLUMNS: ("attn.wo_b", "attn.attn_sink", "experts.w2"),
}


def expected_dimension(name: str) -> int | None:
    module = name.removesuffix(".weight")
    if ".indexer." in name:
        return None
    found = [cut for cut, modules in CUT.items() if module.endswith(modules)]
    return found[0] if found and "hc_head" not in name else None


def formats(config: ModelConfig, layout: Layout) -> list[tuple[Parameter, QuantFormat | None]]:
    return [(one, format_in(layout, one)) for one in parameters(config, "classic").values()]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Geometries that can, and some that cannot be cut."""
    groups = draw(st.sampled_from([1, 2, 4, 8, 12]))
    return ModelConfig.from_dict(
        tiny_config(
            o_groups=groups,
            num_attention_heads=groups * draw(st.integers(1, 3)),
            o_lora_rank=draw(st.sampled_from([16, 64, 96, 128])),
            head_dim=draw(st.sampled_from([64, 128])),
            moe_intermediate_size=draw(st.sampled_from([32, 64, 96, 128, 256, 384])),
            vocab_size=draw(st.integers(17, 500)),
        )
    )


@given(
    config=configs(), layout=st.sampled_from(LAYOUTS), ranks=st.sampled_from(RANKS), data=st.data()
)
def test_every_element_is_held_once_or_everywhere(
    config: ModelConfig, layout: Layout, ranks: int, data: st.DataObject
) -> None:
    stored = formats(config, layout)
    try:
        check_divisible(config, stored, ranks)
    except UserError:
        return
    local = parameters(local_config(config, ranks), "classic")
    held = [local_parameters(config, ranks, rank, "classic") for rank in range(ranks)]
    for parameter, format in stored:
        cuts = [cut_of(parameter, ranks, rank) for rank in range(ranks)]
        dimension = expected_dimension(parameter.name)
        if dimension is None or ranks == 1:
            assert cuts == [None] * ranks, parameter.name
            continue
        assert {cut.dimension for cut in cuts if cut is not None} == {dimension}, parameter.name
        edges = [0, *(cut.stop for cut in cuts if cut is not None)]
        assert [cut.first for cut in cuts if cut is not None] == edges[:-1]
        assert edges == sorted(set(edges))
        assert edges[-1] == parameter.shape[dimension]
        if parameter.name != HEAD:
            assert {stop - first for first, stop in pairwise(edges)} == {
                local[parameter.name].shape[dimension]
            }
        assert format is None or len(parameter.shape) >= 2
    for found in held:
        assert {**found, HEAD: local[HEAD]} == local
    rows = [found[HEAD].shape[0] for found in held]
    assert max(rows) == rows[0]
    assert all(count % HEAD_ROWS == 0 for count in rows[:-1])
    assert max(rows) - min(rows) < 2 * HEAD_ROWS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_joined_parts_are_the_weights(layout: Layout, ranks: int) -> None:
    config = ModelConfig.from_dict(
        tiny_config(num_attention_heads=8, o_groups=4, moe_intermediate_size=128, vocab_size=250)
    )
    check_divisible(config, formats(config, layout), ranks)
    whole = synthetic_weights(config, layout, 3, lambda _: CPU, "classic")
    # A module of two blocks.
    whole |= {name.replace("mtp.0.", "mtp.1."): whole[name] for name in whole}
    held = [rank_weights(whole, config, ranks, rank) for rank in range(ranks)]
    for name, weight in whole.items():
        parts = [weights[name] for weights in held]
        dimension = expected_dimension(name)
        if dimension is None:
            assert all(part is weight for part in parts)
            continue
        values = [part.dequantize() if isinstance(part, QuantTensor) else part for part in parts]
        expected = weight.dequantize() if isinstance(weight, QuantTensor) else weight
        assert torch.equal(torch.cat(values, dimension), expected), name


@pytest.mark.parametrize(("name", "head_rows"), [("v4-flash", 16_160), ("v4-pro", 16_160)])
def test_published_models_split_in_two_four_and_eight(name: str, head_rows: int) -> None:
    config = ModelConfig.from_dict(geometry_config(name))  # pyright: ignore[reportArgumentType]
    for layout in LAYOUTS:
        for ranks in RANKS:
            check_divisible(config, formats(config, layout), ranks)
    assert {local_parameters(config, 8, rank)[HEAD].shape[0] for rank in range(8)} == {head_rows}
    local = local_config(config, 8)
    assert (local.num_attention_heads, local.o_groups) == (
        (8, 1) if name == "v4-flash" else (16, 2)
    )


def test_the_demo_splits_in_two_and_says_so() -> None:
    config = ModelConfig.from_folder(CHECKPOINT)
    stored = formats(config, "nvfp4-experts")
    check_divisible(config, stored, 2)
    refused = r"found 4 with EngineConfig.parallel='tensor', expected 2 \(o_groups is 2\)$"
    with pytest.raises(UserError, match=refused):
        check_divisible(config, stored, 4)


@pytest.mark.parametrize(
    ("changes", "layout", "ranks", "message"),
    [
        ({}, "bf16", 3, r"expected 2 \(3 is not one of 1, 2, 4, 8\)"),
        ({"moe_intermediate_size": 65}, "bf16", 2, r"'pipeline' \(moe_intermediate_size is 65\)"),
        ({"vocab_size": 16}, "bf16", 2, r"'pipeline' \(vocab_size is 16\)"),
        (
            {"moe_intermediate_size": 32},
            "native",
            2,
            r"'pipeline' \(layers.0.ffn.experts.w2.weight: cut: found columns 0 to 16 of a mxfp4 "
            r"weight, expected multiples of 32\)",
        ),
        (
            {"moe_intermediate_size": 768, "o_groups": 4},
            "native",
            4,
            r"expected 2 \(layers.0.ffn.shared_experts.w1.weight: cut: found 192 to 384 of an "
            r"fp8_block128 weight, expected a multiple of 128 first, or one block of 128\)",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_line_with_what_can(
    changes: dict[str, int], layout: Layout, ranks: int, message: str
) -> None:
    config = ModelConfig.from_dict(tiny_config(**changes))
    with pytest.raises(UserError, match=f"EngineConfig.gpus: found {ranks} with .*{message}$"):
        check_divisible(config, iter(formats(config, layout)), ranks)


def test_a_step_has_a_number_for_each_of_its_exchanges() -> None:
    config = ModelConfig.from_dict(tiny_config())
    most = dataclasses.replace(config, compress_ratios=(0,) * 127, num_hidden_layers=127)
    check_divisible(most, [], 2)
    more = dataclasses.replace(config, compress_ratios=(0,) * 128, num_hidden_layers=128)
    check_divisible(more, [], 1)
    with pytest.raises(UserError, match=r"'pipeline' \(num_hidden_layers is 128, above 127\)$"):
        check_divisible(more, [], 2)


def test_a_head_of_few_rows_is_cut_as_long_as_every_rank_has_some() -> None:
    config = ModelConfig.from_dict(tiny_config(vocab_size=17))
    check_divisible(config, formats(config, "bf16"), 2)
    assert [local_parameters(config, 2, rank)[HEAD].shape[0] for rank in range(2)] == [16, 1]


def test_a_rank_is_a_smaller_model_in_nothing_else() -> None:
    config = ModelConfig.from_dict(tiny_config())
    local = local_config(config, 2)
    changed = {"num_attention_heads": 2, "o_groups": 1, "moe_intermediate_size": 32}
    assert local == dataclasses.replace(config, **changed)
    assert local_config(config, 1) == config
