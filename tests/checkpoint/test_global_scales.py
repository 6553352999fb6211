"""NVFP4 global scales that would give weights of another size: divisors, and what none has."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4.errors import UserError
from tests.checkpoint.folders import Tensors, changed_copy, load, read_tensors


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
