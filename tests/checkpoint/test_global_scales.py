"""NVFP4 global scales that would give weights of another size: divisors, and what none has."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint.layer_weights import StoredLayers
from dsv4.errors import UserError
from dsv4.weights.on_demand import WeightOnDemand
from tests.checkpoint.folders import CPU, Tensors, as_bytes, changed_copy, load, read_tensors


@pytest.mark.parametrize("name", ["layers.0.attn.wkv.weight", "layers.2.ffn.experts.5.w1.weight"])
def test_nvfp4_global_scales_that_are_divisors_are_refused_by_name(
    nvfp4_all: Path, tmp_path: Path, name: str
) -> None:
    """compressed-tensors stores them so; a converter may give them the names of ModelOpt alone."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{name}_scale_2"].reciprocal_()

    largest = float(read_tensors(nvfp4_all)[f"{name}_scale"].float().max())
    folder = changed_copy(nvfp4_all, tmp_path / "x", edit)
    divisor = float(read_tensors(folder)[f"{name}_scale_2"])
    found = f"{name}_scale_2: found {divisor:g} with block scales up to {largest:g}, expected"
    with pytest.raises(UserError, match=re.escape(found)):
        load(folder)


def test_nvfp4_scales_may_be_as_large_together_as_mxfp4_scales_alone(
    nvfp4_all: Path, tmp_path: Path
) -> None:
    """An export of MXFP4 weights that load can be loaded."""
    name = "layers.0.attn.wkv.weight"

    def edit(tensors: Tensors, largest: float = 64.0) -> None:
        scale = tensors[f"{name}_scale"].float()
        tensors[f"{name}_scale_2"].fill_(largest / 256)
        tensors[f"{name}_scale"] = (scale / scale.max() * 256).to(torch.float8_e4m3fn)

    load(changed_copy(nvfp4_all, tmp_path / "x", edit))
    with pytest.raises(UserError, match="found 0.5 with block scales up to 256, expected"):
        load(changed_copy(nvfp4_all, tmp_path / "y", partial(edit, largest=128.0)))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0.0, "found 0.0, expected a finite number above 0"),
        (math.nan, "found nan, expected a finite number above 0"),
        (100.0, "found 100 with block scales up to 2, expected a product of at most 64"),
    ],
)
def test_every_global_scale_of_fused_experts_is_checked(
    nvfp4_experts: Path, tmp_path: Path, value: float, found: str
) -> None:
    prefix = "layers.1.ffn.experts"

    def fuse(tensors: Tensors, value: float | None = None) -> None:
        for part in ("weight", "weight_scale", "weight_scale_2"):
            parts = [tensors.pop(f"{prefix}.{expert}.w2.{part}") for expert in range(8)]
            # Not all dtypes can be stacked.
            rows = torch.cat([one.reshape(-1).view(torch.uint8) for one in parts])
            tensors[f"{prefix}.w2.{part}"] = rows.view(parts[0].dtype).view(8, *parts[0].shape)
        for expert in range(8):
            del tensors[f"{prefix}.{expert}.w2.input_scale"]
        if value is not None:
            tensors[f"{prefix}.w2.weight_scale_2"][5] = value

    whole = load(changed_copy(nvfp4_experts, tmp_path / "x", fuse))
    name = f"{prefix}.w2.weight"
    assert as_bytes(whole[name]) == as_bytes(load(nvfp4_experts)[name])
    folder = changed_copy(nvfp4_experts, tmp_path / "y", partial(fuse, value=value))
    refused = re.escape(f": {name}_scale_2: {found}")
    with pytest.raises(UserError, match=refused):
        load(folder)
    experts = StoredLayers(folder).weights(1, CPU, on_demand=True)[name]
    assert isinstance(experts, WeightOnDemand)
    experts[4].stored()
    with pytest.raises(UserError, match=refused):
        experts[5].stored()
