"""The names that a checkpoint may give its tensors: fused experts, older names, a tensor twice."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import (
    Dialect,
    tiny_config,
    write_synthetic,
)
from dsv4.checkpoint.formats import can_be_halved
from dsv4.errors import UserError
from dsv4.weights.quant import QuantFormat
from tests.checkpoint.folders import (
    Tensors,
    as_bytes,
    changed_copy,
    load,
    matrix,
    read_tensors,
)


def test_hf_names_may_have_experts_fused_or_one_by_one(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "fused", tiny_config(), "bf16", 5, names=Dialect.HF)
    fused = read_tensors(tmp_path / "fused")
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 128, 128)

    def unfuse(tensors: Tensors) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate_up = tensors.pop(f"{prefix}.gate_up_proj")
            down = tensors.pop(f"{prefix}.down_proj")
            for expert in range(8):
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate_up[expert, :64].clone()
                tensors[f"{prefix}.{expert}.up_proj.weight"] = gate_up[expert, 64:].clone()
                tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert].clone()

    left = load(tmp_path / "fused")
    right = load(changed_copy(tmp_path / "fused", tmp_path / "x", unfuse))
    assert {name: as_bytes(weight) for name, weight in left.items()} == {
        n: as_bytes(w) for n, w in right.items()
    }


@pytest.mark.parametrize("layout", ["native", "fp8"])
def test_fused_quantised_experts_of_transformers_are_understood(
    native: Path, tmp_path: Path, layout: str
) -> None:
    raw = tiny_config(
        moe_intermediate_size=128, expert_dtype="fp4" if layout == "native" else "fp8"
    )
    write_synthetic(tmp_path / "a", raw, "native", 5, names=Dialect.HF)

    def fuse(tensors: Tensors) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            for projections, fused in (
                (("gate_proj", "up_proj"), "gate_up_proj"),
                (("down_proj",), "down_proj"),
            ):
                for component, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                    names = [
                        [f"{prefix}.{e}.{p}.{component}" for p in projections] for e in range(8)
                    ]
                    stacked = torch.stack(
                        [torch.cat([tensors.pop(name) for name in row]) for row in names]
                    )
                    if layout == "fp8":
                        stacked = fp8_like(stacked, component)
                    tensors[f"{prefix}.{fused}{suffix}"] = stacked

    expected = load(tmp_path / "a")
    config = {} if layout == "native" else {"expert_dtype": "fp8"}
    fused = load(changed_copy(tmp_path / "a", tmp_path / "b", fuse, config))
    w3 = matrix(fused, "layers.1.ffn.experts.w3.weight")
    if layout == "native":
        assert as_bytes(w3) == as_bytes(expected["layers.1.ffn.experts.w3.weight"])
    else:
        assert w3.format is QuantFormat.FP8_BLOCK128
        assert w3.dequantize().unique().tolist() == [4.0]


def fp8_like(stacked: Tensor, component: str) -> Tensor:
    """Fused FP8 experts: gate rows are 1, up rows 2, both with scale 2."""
    experts, rows = stacked.shape[:2]
    columns = 128
    if component == "weight":
        halves = torch.ones(experts, rows, columns)
        halves[:, rows // 2 :] = 2
        return halves.to(torch.float8_e4m3fn)
    return torch.full((experts, rows // 128, 1), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_fused_experts_that_cannot_be_halved_are_refused_by_name(
    nvfp4_experts: Path, tmp_path: Path
) -> None:
    """Gate and up rows of NVFP4 have global scales of their own, which are one tensor here."""

    def fuse(tensors: Tensors) -> None:
        prefix = "layers.1.ffn.experts"
        for component in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            parts = [
                [tensors.pop(f"{prefix}.{e}.{p}.{component}").view(-1) for p in ("w1", "w3")]
                for e in range(8)
            ]
            tensors[f"{prefix}.w13.{component}"] = torch.stack(
                [torch.cat([part.view(torch.uint8) for part in row]) for row in parts]
            )

    kind = "in a format not supported for fused experts"
    with pytest.raises(
        UserError, match=rf": 2 {kind}: layers.1.ffn.experts.w13 \(nvfp4\), \S+ \S+$"
    ):
        load(changed_copy(nvfp4_experts, tmp_path / "x", fuse))


@pytest.mark.parametrize(
    ("format", "rows", "expected"),
    [
        (QuantFormat.BF16, 64, True),
        (QuantFormat.MXFP4, 64, True),
        (QuantFormat.FP8_BLOCK128, 128, True),
        (QuantFormat.FP8_BLOCK128, 64, False),
        (QuantFormat.NVFP4, 128, False),
    ],
)
def test_fused_rows_can_be_halved_where_no_scale_is_for_both_halves(
    format: QuantFormat, rows: int, expected: bool
) -> None:
    assert can_be_halved(format, (8, rows, 192)) is expected


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a", tiny_config(), "bf16", 5, names=Dialect.HF)
    new = "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"

    def edit(tensors: Tensors) -> None:
        tensors[new.replace("scorer.", "")] = tensors[new].clone()

    with pytest.raises(
        UserError, match="1 present twice: .*weights_proj.weight and .*weights_proj.weight"
    ):
        load(changed_copy(tmp_path / "a", tmp_path / "b", edit))


def test_older_indexer_name_loads(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a", tiny_config(), "bf16", 5, names=Dialect.HF)

    def edit(tensors: Tensors) -> Tensors:
        return {
            name.replace("indexer.scorer.", "indexer."): tensor for name, tensor in tensors.items()
        }

    assert (
        load(changed_copy(tmp_path / "a", tmp_path / "b", edit)).keys()
        == load(tmp_path / "a").keys()
    )
