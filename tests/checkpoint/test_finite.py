"""Matrices whose bytes are no numbers are refused by the name of the tensor, with the place."""

import math
import re
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import load_ranks, open_checkpoint
from dsv4.checkpoint.layer_weights import StoredLayers
from dsv4.errors import UserError
from dsv4.parallel.placement import Placement
from dsv4.weights.on_demand import WeightOnDemand
from tests.checkpoint.folders import CPU, Tensors, changed_copy, config_of, load

EXPERT = "layers.2.ffn.experts.5.w2.weight"


def refusal(name: str, found: str, place: list[int]) -> str:
    """A pattern of the message."""
    return f"{re.escape(f': {name}: found {found} at {place}, expected finite numbers')}$"


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.attn.wq_b.weight", EXPERT])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bf16_elements_are_finite(bf16: Path, tmp_path: Path, name: str, value: float) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name][3, 2] = value
        tensors[name][4, 0] = value

    folder = changed_copy(bf16, tmp_path / "x", edit)
    with pytest.raises(UserError, match=refusal(name, f"{value:g}", [3, 2])):
        load(folder)


def test_f32_elements_are_finite(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["head.weight"] = tensors["head.weight"].float()
        tensors["head.weight"][0, 1] = -math.inf

    folder = changed_copy(native, tmp_path / "x", edit)
    with pytest.raises(UserError, match=refusal("head.weight", "-inf", [0, 1])):
        load(folder)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_codes_are_numbers(native: Path, tmp_path: Path, code: int) -> None:
    name = "layers.0.attn.wkv.weight"

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[3, 2] = code

    folder = changed_copy(native, tmp_path / "x", edit)
    with pytest.raises(UserError, match=refusal(name, "nan", [3, 2])):
        load(folder)


def test_every_other_e4m3_code_is_one(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        codes = tensors["layers.0.attn.wkv.weight"].view(torch.uint8)
        codes[0].copy_(torch.arange(codes.shape[1]) % 0x7F)
        codes[1].copy_(torch.arange(codes.shape[1]) % 0x7F + 0x80)

    load(changed_copy(native, tmp_path / "x", edit))


def test_ranks_name_the_place_in_the_file(bf16: Path, tmp_path: Path) -> None:
    """The last row belongs to rank 1."""

    def edit(tensors: Tensors) -> None:
        tensors["head.weight"][-1, 5] = math.nan

    checkpoint = open_checkpoint(changed_copy(bf16, tmp_path / "x", edit))
    config = config_of(checkpoint)
    placement = Placement.tensor(config.num_hidden_layers, [CPU] * 2)
    place = [config.vocab_size - 1, 5]
    with pytest.raises(UserError, match=refusal("head.weight", "nan", place)):
        load_ranks(checkpoint, config, placement)


def test_an_expert_that_is_read_alone_has_its_name(bf16: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[EXPERT][0, 0] = math.nan

    source = StoredLayers(changed_copy(bf16, tmp_path / "x", edit))
    name = EXPERT.replace(".5.", ".")
    experts = source.weights(2, CPU, on_demand=True)[name]
    assert isinstance(experts, WeightOnDemand)
    experts[4].stored()
    with pytest.raises(UserError, match=refusal(EXPERT, "nan", [0, 0])):
        experts[5].stored()
