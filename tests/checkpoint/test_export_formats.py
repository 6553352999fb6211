"""Conversion between quantised formats: exact casts, scales, what no format holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4.checkpoint import Dialect, tiny_config, write_synthetic
from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.export import export
from dsv4.errors import UserError
from dsv4.weights.codes import exponent_to_e8m0
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.checkpoint.folders import (
    Tensors,
    as_bytes,
    changed_copy,
    load,
    matrix,
    read_tensors,
)

pytestmark = pytest.mark.slow


def test_mxfp4_to_nvfp4_is_lossless(native: Path, tmp_path: Path) -> None:
    export(native, tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    before = load(native)
    after = load(tmp_path / "x")
    for name, weight in before.items():
        if isinstance(weight, QuantTensor) and ".experts." in name:
            assert matrix(after, name).format is QuantFormat.NVFP4
            assert torch.equal(matrix(after, name).data, weight.data)
            assert torch.equal(matrix(after, name).dequantize(), weight.dequantize())


def test_untouched_tensors_of_an_nvidia_export_keep_their_bytes(
    native: Path, tmp_path: Path
) -> None:
    export(native, tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    before = read_tensors(native)
    after = read_tensors(tmp_path / "x")
    kept = [name for name in before if name.startswith("mtp.") or ".experts." not in name]
    assert "mtp.0.ffn.experts.0.w1.scale" in kept
    assert all(as_bytes(before[name]) == as_bytes(after[name]) for name in kept)
    expert = "layers.0.ffn.experts.0.w1"
    shapes = {
        name.removeprefix(f"{expert}."): (t.dtype, tuple(t.shape))
        for name, t in after.items()
        if expert in name
    }
    assert shapes == {
        "weight": (torch.uint8, (64, 64)),
        "weight_scale": (torch.float8_e4m3fn, (64, 8)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }


def mxfp4(exponents: list[int], code: int = 0x77) -> QuantTensor:
    data = torch.full((1, 16 * len(exponents)), code, dtype=torch.uint8)
    scale = exponent_to_e8m0(torch.tensor([exponents]))
    return QuantTensor(data, scale, None, QuantFormat.MXFP4, (1, 32 * len(exponents)))


def test_cast_covers_exactly_the_exponents_of_e4m3() -> None:
    w1, w3 = convert([mxfp4([-10, -27]), mxfp4([-20, -15])], QuantFormat.NVFP4)
    assert w1.global_scale is not None
    assert float(w1.global_scale) == 2.0**-18
    assert w1.global_scale is w3.global_scale
    assert torch.equal(w1.dequantize(), mxfp4([-10, -27]).dequantize())
    assert torch.equal(w3.dequantize(), mxfp4([-20, -15]).dequantize())
    wide = convert([mxfp4([-10, -28])], QuantFormat.NVFP4)[0]
    assert wide.global_scale is not None
    assert torch.equal(wide.global_scale, torch.tensor(6 * 2.0**-10 / 2688))


@pytest.mark.parametrize("code", [0x40, 0x20, 0x10, 0x04, 0x02, 0x01])
def test_a_group_of_one_half_of_the_codes_is_none_of_zeros(code: int) -> None:
    data = torch.cat([torch.full((1, 16), code), torch.full((1, 16), 0x22)], dim=1)
    scale = exponent_to_e8m0(torch.tensor([[3, 0]]))
    weight = QuantTensor(data.to(torch.uint8), scale, None, QuantFormat.MXFP4, (1, 64))
    [cast] = convert([weight], QuantFormat.NVFP4)
    assert torch.equal(cast.data, weight.data)
    assert torch.equal(cast.dequantize(), weight.dequantize())


def test_groups_of_zeros_do_not_limit_the_cast() -> None:
    zeros = mxfp4([-126], code=0x80)
    ones = mxfp4([3])
    joined = QuantTensor(
        torch.cat([zeros.data, ones.data], dim=1),
        exponent_to_e8m0(torch.tensor([[-126, 3]])),
        None,
        QuantFormat.MXFP4,
        (1, 64),
    )
    cast = convert([joined], QuantFormat.NVFP4)[0]
    assert torch.equal(cast.data, joined.data)
    assert torch.equal(cast.dequantize(), joined.dequantize())
    alone = convert([zeros], QuantFormat.NVFP4)[0]
    assert torch.equal(alone.dequantize(), torch.zeros(1, 32))


def test_e8m0_nan_is_refused() -> None:
    scale = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = QuantTensor(
        torch.full((1, 16), 1, dtype=torch.uint8), scale, None, QuantFormat.MXFP4, (1, 32)
    )
    with pytest.raises(ValueError, match="found NaN or infinity"):
        convert([weight], QuantFormat.NVFP4)


def test_spec11_e31_quantised_w1_and_w3_share_their_global_scale(
    bf16: Path, tmp_path: Path
) -> None:
    export(bf16, tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    before = load(bf16)
    after = load(tmp_path / "x")
    w1, w2, w3 = (
        matrix(after, f"layers.1.ffn.experts.{name}.weight").global_scale
        for name in ("w1", "w2", "w3")
    )
    assert w1 is not None
    assert w2 is not None
    assert w3 is not None
    assert torch.equal(w1, w3)
    values = [
        matrix(before, f"layers.1.ffn.experts.{name}.weight").dequantize() for name in ("w1", "w3")
    ]
    amax = torch.stack(values).abs().amax(dim=(0, 2, 3))
    assert torch.equal(w1, amax / 2688)


def test_an_all_zero_half_does_not_set_the_shared_scale() -> None:
    weights = [QuantTensor.dense(torch.zeros(2, 32)), QuantTensor.dense(torch.full((2, 32), 1e-3))]
    converted = convert(weights, QuantFormat.NVFP4)
    assert torch.allclose(converted[1].dequantize(), torch.full((2, 32), 1e-3), rtol=0.05)
    for zeros in convert([weights[0], weights[0]], QuantFormat.NVFP4):
        assert zeros.global_scale == 1.0
        assert not zeros.dequantize().any()


@pytest.mark.parametrize("format", [QuantFormat.MXFP4, QuantFormat.NVFP4])
def test_halves_of_two_formats_get_one_and_a_half_in_it_is_kept(format: QuantFormat) -> None:
    packed = mxfp4([3])
    converted = convert([packed, QuantTensor.dense(packed.dequantize())], format)
    assert (converted[0] is packed) == (format is QuantFormat.MXFP4)
    for weight in converted:
        assert weight.format is format
        assert torch.allclose(weight.dequantize(), packed.dequantize())


def test_spec11_e34_known_input_scales_come_along_and_unknown_ones_are_one(
    nvfp4_experts: Path, native: Path, tmp_path: Path
) -> None:
    name = "layers.2.ffn.experts.5.w3.input_scale"

    def edit(tensors: Tensors) -> None:
        tensors[name].fill_(0.37)

    export(
        changed_copy(nvfp4_experts, tmp_path / "a", edit), tmp_path / "b", "nvfp4-all", Dialect.HF
    )
    renamed = "model.layers.2.mlp.experts.5.up_proj.input_scale"
    assert float(read_tensors(tmp_path / "b")[renamed]) == pytest.approx(0.37)
    export(native, tmp_path / "c", "nvfp4-experts", Dialect.NATIVE)
    assert float(read_tensors(tmp_path / "c")[name]) == 1.0


@pytest.mark.parametrize("module", ["layers.2.ffn.experts.5.w3", "layers.0.attn.wkv"])
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_2"])
def test_scales_that_cannot_be_loaded_are_not_passed_on(
    nvfp4_all: Path, tmp_path: Path, module: str, scale: str
) -> None:
    name = f"{module}.{scale}"

    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = torch.nan

    folder = changed_copy(nvfp4_all, tmp_path / "a", edit)
    with pytest.raises(UserError, match=f"{name}: found nan"):
        export(folder, tmp_path / "b", "nvfp4-all", Dialect.NATIVE)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.attn.wq_a.weight", r"wq_a.weight: {found} fp8_block128"),
        ("layers.1.ffn.experts.3.w2.weight", r"experts.w2.weight \(expert 3\): {found} mxfp4"),
    ],
)
def test_weights_whose_scales_could_not_be_loaded_are_refused(
    bf16: Path, tmp_path: Path, name: str, message: str
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name][0, 0] = -(2.0**17)

    folder = changed_copy(bf16, tmp_path / "a", edit)
    found = "found weights up to 131072, too large for the scales of"
    with pytest.raises(UserError, match=message.format(found=found)):
        export(folder, tmp_path / "b", "native", Dialect.NATIVE)
    assert not (tmp_path / "b").exists()


def test_width_that_the_target_cannot_hold_is_a_clean_error(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a", tiny_config(q_lora_rank=72), "bf16", 1)
    with pytest.raises(
        UserError, match=r"layers.0.attn.wq_b.weight: .*K = 72, expected a multiple of 16 for nvfp4"
    ):
        export(tmp_path / "a", tmp_path / "b", "nvfp4-all", Dialect.NATIVE)
    assert not (tmp_path / "b").exists()


def test_float16_is_refused_by_name(bf16: Path, tmp_path: Path) -> None:
    tensors = {
        name: t.half() if t.dtype == torch.bfloat16 else t for name, t in read_tensors(bf16).items()
    }
    folder = changed_copy(bf16, tmp_path / "x")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="found F16, expected BF16"):
        load(folder)


def test_quantised_demo_path_keeps_what_quantise_gives(bf16: Path, tmp_path: Path) -> None:
    export(bf16, tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    weight = matrix(load(bf16), "layers.0.attn.wo_b.weight").dequantize()
    expected = quantize(weight, QuantFormat.FP8_BLOCK128)
    assert as_bytes(matrix(load(tmp_path / "x"), "layers.0.attn.wo_b.weight")) == as_bytes(expected)
