"""Strict loading of every layout and dialect: the right bytes, or one line with everything that is
wrong.
"""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import (
    Dialect,
    Layout,
    describe,
    index,
    load_weights,
    mtp_kind,
    open_checkpoint,
    synthetic_weights,
    tiny_config,
    transfer,
    write_synthetic,
)
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import Role, layer_of, parameters
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.checkpoint.folders import (
    CPU,
    Tensors,
    as_bytes,
    changed_copy,
    config_of,
    load,
    matrix,
    read_tensors,
)

DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 200,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}


@pytest.mark.slow
@pytest.mark.parametrize("names", list(Dialect))
@pytest.mark.parametrize("layout", ["nvfp4-experts", "nvfp4-all", "native", "bf16", "f32"])
def test_every_layout_and_dialect_loads_the_bytes_that_were_written(
    layout: Layout, names: Dialect, tmp_path: Path
) -> None:
    write_synthetic(
        tmp_path / "x", tiny_config(), layout, 7, names=names, mtp="classic", shard_bytes=400_000
    )
    checkpoint = open_checkpoint(tmp_path / "x")
    config = config_of(checkpoint)
    expected = synthetic_weights(config, layout, 7, lambda _: CPU, mtp="classic")
    loaded = load(tmp_path / "x", mtp="classic")
    assert list(loaded) == list(parameters(config, "classic"))
    for name, weight in expected.items():
        assert as_bytes(loaded[name]) == as_bytes(weight), name
    described = describe(checkpoint, config, "classic")
    sizes = {name: weight.nbytes for name, weight in loaded.items()}
    assert {one.parameter.name: one.nbytes for one in described} == sizes
    formats = {
        name: weight.format if isinstance(weight, QuantTensor) else None
        for name, weight in loaded.items()
    }
    assert {one.parameter.name: one.format for one in described} == formats


def test_roles_decide_the_type_of_the_result(nvfp4_experts: Path) -> None:
    weights = load(nvfp4_experts)
    for name, parameter in parameters(ModelConfig.from_folder(nvfp4_experts)).items():
        weight = weights[name]
        assert tuple(weight.shape) == parameter.shape
        if parameter.role in (Role.LINEAR, Role.EXPERT, Role.FLOOR):
            assert isinstance(weight, QuantTensor)
        else:
            dtypes = {Role.NORM: torch.bfloat16, Role.FLOAT: torch.float32, Role.TABLE: torch.int64}
            assert isinstance(weight, Tensor)
            assert weight.dtype == dtypes[parameter.role]
    assert matrix(weights, "layers.2.ffn.experts.w1.weight").format is QuantFormat.NVFP4
    assert matrix(weights, "layers.2.attn.wq_a.weight").format is QuantFormat.FP8_BLOCK128
    assert matrix(weights, "head.weight").format is QuantFormat.BF16


def test_bfloat16_floats_become_float32_and_int32_tables_int64(bf16: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].bfloat16()
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()

    expected = load(bf16)
    weights = load(changed_copy(bf16, tmp_path / "x", edit))
    fn = weights["layers.0.hc_attn_fn"]
    expected_fn = expected["layers.0.hc_attn_fn"]
    assert isinstance(expected_fn, Tensor)
    assert as_bytes(fn) == as_bytes(expected_fn.bfloat16().float())
    assert as_bytes(weights["layers.0.ffn.gate.tid2eid"]) == as_bytes(
        expected["layers.0.ffn.gate.tid2eid"]
    )


def test_all_problems_are_in_one_line(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["layers.1.attn.wq_a.scale"]
        tensors["layers.1.attn.surprise.weight"] = torch.zeros(1)
        tensors["rotary.inv_freq"] = torch.zeros(1)
        tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
        tensors["head.weight"] = tensors["head.weight"].half()

    with pytest.raises(UserError) as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    message = str(caught.value)
    assert "1 missing: layers.1.attn.wq_a.scale" in message
    assert "2 unexpected: rotary.inv_freq, layers.1.attn.surprise.weight" in message
    assert "1 of wrong shape: norm.weight (found [127], expected [128])" in message
    assert "1 of wrong dtype: head.weight (found F16, expected BF16)" in message
    assert "\n" not in message


def test_long_lists_are_capped_with_a_count(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("layers.3.ffn.experts.")
        }

    with pytest.raises(UserError, match=r"48 missing: .*\(and 40 more\)$") as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    assert len(str(caught.value)) < 1000


def test_a_wrong_tensor_among_many_experts_is_found(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.5.w2.weight"] = tensors["layers.2.ffn.experts.5.w2.weight"][
            :, :-1
        ].clone()

    with pytest.raises(
        UserError,
        match=r"layers.2.ffn.experts.5.w2.weight \(found \[128, 31\], expected \[128, 32\]\)",
    ):
        load(changed_copy(native, tmp_path / "x", edit))


def test_hostile_names_are_escaped(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["evil\nname\x1b[31m"] = torch.zeros(1)

    with pytest.raises(UserError, match="unexpected") as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm.weight", float("nan"), "1 not finite: norm.weight"),
        ("layers.0.attn.attn_sink", float("inf"), "1 not finite: layers.0.attn.attn_sink"),
        ("layers.0.ffn.gate.tid2eid", 8, r"tid2eid \(found expert ids 0 to 8, expected 0 to 7\)"),
        ("layers.0.ffn.gate.tid2eid", -1, r"tid2eid \(found expert ids -1 to 7, expected 0 to 7\)"),
        (
            "layers.2.ffn.experts.3.w1.weight_scale_2",
            0.0,
            r"experts.3.w1.weight_scale_2: found 0.0",
        ),
        (
            "layers.2.ffn.experts.3.w1.weight_scale_2",
            float("nan"),
            r"experts.3.w1.weight_scale_2: found nan",
        ),
    ],
)
def test_impossible_values_are_refused(
    nvfp4_experts: Path, tmp_path: Path, name: str, value: float, message: str
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    with pytest.raises(UserError, match=message):
        load(changed_copy(nvfp4_experts, tmp_path / "x", edit))


def test_mtp_tensors_are_skipped_knowingly_and_loaded_on_request(
    native: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dsv4"):
        weights = load(native)
    assert not any(name.startswith("mtp.") for name in weights)
    assert [record.message for record in caplog.records] == [
        f"{native}: skipping the mtp tensors (classic)"
    ]
    assert mtp_kind(open_checkpoint(native)) == "classic"
    assert "mtp.0.e_proj.weight" in load(native, mtp="classic")


def test_spec11_h51_dspark_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    raw = tiny_config(compress_ratios=[0, 4, 128, 4, 0, 0, 0], **DSPARK)
    write_synthetic(tmp_path / "x", raw, "native", 1, mtp="dspark")
    assert mtp_kind(open_checkpoint(tmp_path / "x")) == "dspark"
    weights = load(tmp_path / "x", mtp="dspark")
    assert weights["mtp.2.markov_head.markov_w1.weight"].shape == (256, 32)
    assert len(load(tmp_path / "x")) < len(weights)
    with pytest.raises(UserError, match="mtp tensors: found dspark, expected classic"):
        load(tmp_path / "x", mtp="classic")


def test_mtp_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x", tiny_config(), "native", 1)
    with pytest.raises(UserError, match="mtp tensors: found none, expected classic"):
        load(tmp_path / "x", mtp="classic")


def test_device_of_is_asked_once_and_progress_ends_at_the_total(native: Path) -> None:
    """Of two devices, which are the CPU under two names."""
    checkpoint = open_checkpoint(native)
    seen = []
    asked = []

    def device_of(name: str) -> torch.device:
        asked.append(name)
        return torch.device("cpu:1") if name.startswith("layers.1.") else CPU

    weights = load_weights(
        checkpoint,
        config_of(checkpoint),
        device_of=device_of,
        progress=lambda *state: seen.append(state),
    )
    assert sorted(asked) == sorted(weights)
    for name, expected in load(native).items():
        assert as_bytes(weights[name]) == as_bytes(expected), name
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(weight.nbytes for weight in weights.values())


@pytest.mark.gpu
def test_every_gpu_gets_the_bytes_of_the_files(
    nvfp4_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through staging buffers that are smaller than most tensors."""
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1000)
    checkpoint = open_checkpoint(nvfp4_experts)
    count = torch.cuda.device_count()

    def device_of(name: str) -> torch.device:
        layer = layer_of(name)
        return torch.device("cuda", 0 if layer is None else layer % count)

    weights = load_weights(checkpoint, config_of(checkpoint), device_of=device_of)
    assert {name: weight.device for name, weight in weights.items()} == {
        name: device_of(name) for name in weights
    }
    for name, expected in load(nvfp4_experts).items():
        assert as_bytes(weights[name]) == as_bytes(expected), name


def test_describe_reads_no_tensor(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(native)
    monkeypatch.setattr(index, "map_tensor", None)
    assert len(describe(checkpoint, config_of(checkpoint))) == len(
        parameters(config_of(checkpoint))
    )


def test_describe_raises_like_loading(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["norm.weight"]

    checkpoint = open_checkpoint(changed_copy(native, tmp_path / "x", edit))
    with pytest.raises(UserError, match=r"1 missing: norm.weight"):
        describe(checkpoint, config_of(checkpoint))


def test_file_that_shrinks_during_the_load_is_one_line(native: Path, tmp_path: Path) -> None:
    folder = changed_copy(native, tmp_path / "x")
    checkpoint = open_checkpoint(folder)
    small = sum(
        one.nbytes for one in describe(checkpoint, config_of(checkpoint)) if one.format is None
    )

    def shrink(done: int, total: int) -> None:
        if done == small:
            (folder / "model.safetensors").write_bytes(b"")

    with pytest.raises(
        UserError, match=r"model.safetensors: truncated: found \d+ bytes, expected at least \d+$"
    ):
        load_weights(checkpoint, config_of(checkpoint), device_of=lambda _: CPU, progress=shrink)


def test_loaded_weights_do_not_depend_on_the_folder(native: Path, tmp_path: Path) -> None:
    folder = changed_copy(native, tmp_path / "x")
    weights = load(folder)
    before = {name: as_bytes(weight) for name, weight in weights.items()}
    (folder / "model.safetensors").write_bytes(b"")
    assert {name: as_bytes(weight) for name, weight in weights.items()} == before


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


def test_absurd_geometry_is_refused_before_it_costs_time(native: Path, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1024, "n_routed_experts": 2**14, "compress_ratios": [0] * 1024}
    with pytest.raises(UserError, match="expected at most 1000000"):
        load(changed_copy(native, tmp_path / "x", config=config))
