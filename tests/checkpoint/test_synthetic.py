"""Random weights are as large as those that keep activations near 1, in files of asked sizes."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import (
    Layout,
    synthetic_rank_weights,
    synthetic_weights,
    tiny_config,
    write_synthetic,
)
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import Role, parameters
from dsv4.weights.quant import QuantTensor
from tests.checkpoint.folders import CPU, as_bytes, read_tensors

CONFIG = ModelConfig.from_dict(tiny_config())


@pytest.mark.parametrize("layout", get_args(Layout))
def test_matrices_have_a_deviation_near_one_by_the_root_of_their_inputs(layout: Layout) -> None:
    for name, weight in synthetic_weights(CONFIG, layout, 3, lambda _: CPU, "classic").items():
        if isinstance(weight, QuantTensor):
            values = weight.dequantize().float()
            root = math.sqrt(weight.shape[-1])
            # Scales are powers of two: few blocks may have one factor in common.
            assert 0.33 < values.std() * root < 3, name


@pytest.mark.parametrize("layout", ["native", "f32"])
def test_vectors_are_near_what_they_multiply_or_add(layout: Layout) -> None:
    weights = synthetic_weights(CONFIG, layout, 3, lambda _: CPU, "classic")
    found = defaultdict(list)
    for name, parameter in parameters(CONFIG, "classic").items():
        weight = weights[name]
        if parameter.role is Role.NORM or name.endswith("_scale"):
            assert isinstance(weight, Tensor)
            found["factor"].append((weight.float() - 1) * 10)
        elif name.endswith("_fn"):
            assert isinstance(weight, Tensor)
            found["mixing"].append(weight.flatten() * math.sqrt(weight.shape[-1]))
        elif parameter.role is Role.FLOAT:
            assert isinstance(weight, Tensor)
            found["bias"].append(weight.flatten() * 2)
    assert len(found) == 3
    for kind, parts in found.items():
        noise = torch.cat(parts)
        assert noise.mean().abs() < 0.1, kind
        assert 0.9 < noise.std() < 1.1, kind


def test_scales_of_neighbouring_blocks_differ() -> None:
    """By a factor of 4 at most: a misplaced one is seen, none stands out."""
    weights = synthetic_weights(CONFIG, "nvfp4-experts", 3, lambda _: CPU)
    experts = weights["layers.1.ffn.experts.w1.weight"]
    assert isinstance(experts, QuantTensor)
    assert experts.block_scale is not None
    assert experts.block_scale.float().unique().tolist() == [0.5, 1, 2]


def test_parts_of_ranks_depend_on_the_seed() -> None:
    name = "layers.1.ffn.experts.w1.weight"
    drawn = [
        synthetic_rank_weights(CONFIG, "native", seed, CPU, 2, rank)[name]
        for seed in (3, 30)
        for rank in (0, 1)
    ]
    assert len({str(as_bytes(weight)) for weight in drawn}) == 4


def test_an_unknown_format_is_named() -> None:
    layout: Any = "fp16"
    for draw in (
        lambda: synthetic_weights(CONFIG, layout, 3, lambda _: CPU),
        lambda: synthetic_rank_weights(CONFIG, layout, 3, CPU, 2, 0),
    ):
        with pytest.raises(UserError, match="^checkpoint format: found 'fp16', expected one of"):
            draw()


def test_a_written_folder_has_shards_of_the_asked_size(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x", tiny_config(), "native", 1, shard_bytes=400_000)
    sizes = [file.stat().st_size for file in (tmp_path / "x").glob("*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) < 500_000


def test_input_scales_that_nobody_has_measured_are_one(nvfp4_all: Path) -> None:
    tensors = read_tensors(nvfp4_all)
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".input_scale")]
    assert scales
    assert all(scale.dtype == torch.float32 and scale.item() == 1 for scale in scales)
