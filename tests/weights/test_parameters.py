"""The canonical parameter list against the tensor lists of the four published checkpoints."""

import re

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import Dialect, Layout, tiny_config
from dsv4.checkpoint.outputs import output_tensors
from dsv4.checkpoint.shard import DTYPE_NAMES
from dsv4.checkpoint.writer import OutputTensor
from dsv4.config import ModelConfig
from dsv4.weights.parameters import (
    MtpKind,
    Parameter,
    Role,
    layer_of,
    mtp_stages,
    parameters,
    shown_mtp,
)
from dsv4.weights.quant import QuantTensor
from tests.releases import RELEASES, Release, recorded_tensors


class NamesOnly:
    """Plans tensors without values."""

    def matrix(self, parameter: Parameter, expert: int | None) -> QuantTensor:
        raise AssertionError("no value is needed to plan")

    def plain(self, parameter: Parameter) -> Tensor:
        raise AssertionError("no value is needed to plan")

    def input_scale(self, parameter: Parameter, expert: int | None) -> Tensor | None:
        return torch.tensor(1.0)

    def fp8_scale_dtype(self, parameter: Parameter) -> torch.dtype:
        return torch.float8_e8m0fnu


def planned(release: Release, layout: Layout) -> list[OutputTensor]:
    config = ModelConfig.from_dict(release.raw_config)
    return output_tensors(layout, Dialect.NATIVE, parameters(config, release.mtp), NamesOnly())


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASES)
def test_parameter_list_is_the_tensor_list_of_the_published_checkpoint(name: str) -> None:
    release = RELEASES[name]
    tensors = planned(release, "native")
    assert len(tensors) == release.tensors
    assert sum(tensor.nbytes for tensor in tensors) == release.nbytes
    recorded = recorded_tensors(name)
    last = release.raw_config["n_routed_experts"] - 1
    found = {tensor.name: (DTYPE_NAMES[tensor.dtype], tensor.shape) for tensor in tensors}
    middle = [
        key
        for key in found
        if (match := re.search(r"\.experts\.(\d+)\.", key)) and int(match[1]) not in (0, last)
    ]
    for key in middle:
        assert found.pop(key) == recorded[re.sub(r"\.experts\.\d+\.", ".experts.0.", key)]
    assert found == recorded


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "gigabytes"), [("flash_apr", 135_235, 168), ("pro_apr", 285_660, 913)]
)
def test_nvfp4_experts_layout_has_the_size_of_the_nvidia_export(
    name: str, count: int, gigabytes: int
) -> None:
    tensors = planned(RELEASES[name], "nvfp4-experts")
    assert len(tensors) == count
    assert sum(tensor.nbytes for tensor in tensors) // 10**9 == gigabytes


def test_published_indexes_count_three_dspark_stages_although_the_config_says_one() -> None:
    config = ModelConfig.from_dict(RELEASES["flash_0731"].raw_config)
    assert config.num_nextn_predict_layers == 1
    assert mtp_stages(config, "dspark") == 3


def test_hash_layers_have_a_table_and_a_learned_gate_and_no_bias() -> None:
    names = parameters(ModelConfig.from_dict(tiny_config()))
    assert "layers.0.ffn.gate.tid2eid" in names
    assert "layers.0.ffn.gate.weight" in names
    assert "layers.0.ffn.gate.bias" not in names
    assert "layers.3.ffn.gate.bias" in names
    assert "layers.3.ffn.gate.tid2eid" not in names


def test_experts_are_stacked_and_gates_stay_on_the_precision_floor() -> None:
    listed = parameters(ModelConfig.from_dict(tiny_config()))
    assert listed["layers.1.ffn.experts.w2.weight"] == Parameter(
        "layers.1.ffn.experts.w2.weight", (8, 128, 64), Role.EXPERT
    )
    floor = {
        name.split(".", 2)[2]
        for name, parameter in listed.items()
        if name.startswith("layers.1.") and parameter.role is Role.FLOOR
    }
    assert floor == {
        *("attn.compressor.wkv.weight", "attn.compressor.wgate.weight", "ffn.gate.weight"),
        *(
            "attn.indexer.compressor.wkv.weight",
            "attn.indexer.compressor.wgate.weight",
            "attn.indexer.weights_proj.weight",
        ),
    }


def test_layer_of_knows_what_belongs_to_no_layer() -> None:
    assert layer_of("layers.12.attn.wq_a.weight") == 12
    assert layer_of("head.weight") is None
    assert layer_of("mtp.0.attn.wq_a.weight") is None


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["head.weight"], None),
        (["head.weight", "mtp.0.norm.weight", "mtp.1.norm.weight"], ("classic", 2)),
        (["mtp.0.main_proj.weight"], ("dspark", 1)),
        (["mtp.12.markov_head.markov_w1.weight", "mtp.3.norm.weight"], ("dspark", 13)),
        (["mtp.norm.weight"], ("classic", 0)),
    ],
)
def test_names_show_a_speculative_module(
    names: list[str], shown: tuple[MtpKind, int] | None
) -> None:
    assert shown_mtp(names) == shown


def test_a_module_may_have_other_blocks_than_the_published_one() -> None:
    names = parameters(ModelConfig.from_dict(tiny_config()), "classic", stages=2)
    assert shown_mtp(names) == ("classic", 2)
