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


def test_loaded_weights_do_not_depend_on_the_folder(native: Path, tmp_path: Path) -> None:
    folder = changed_copy(native, tmp_path / "x")
    weights = load(folder)
    before = {name: as_bytes(weight) for name, weight in weights.items()}
    (folder / "model.safetensors").write_bytes(b"")
    assert {name: as_bytes(weight) for name, weight in weights.items()} == before
