"""Which module "auto" takes of the checkpoint, and when it takes none."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import Engine, EngineConfig
from dsv4.checkpoint import write_synthetic
from dsv4.errors import UserError
from dsv4.opened_checkpoint import OpenedCheckpoint
from tests.speculative.test_opened_draft import SETTINGS, raw_config


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that brings a module."""
    folder = tmp_path_factory.mktemp("brought") / "checkpoint"
    write_synthetic(folder, raw_config("dspark"), "nvfp4-experts", 0, mtp="dspark")
    return folder


def test_auto_takes_the_checkpoint_s_module_with_the_cuda_ops(brought: Path) -> None:
    on_gpu = EngineConfig(max_context=64, prefill_chunk=16)
    off = dataclasses.replace(on_gpu, draft="off")
    found = OpenedCheckpoint.open(brought, on_gpu, 10**11)
    assert found.draft is not None
    assert found.draft.kind == "dspark"
    assert OpenedCheckpoint.open(brought, off, 10**11).draft is None
    on_cpu = dataclasses.replace(SETTINGS, max_context=64)
    assert OpenedCheckpoint.open(brought, on_cpu).draft is None


def test_nothing_is_said_of_a_module_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoint"
    write_synthetic(folder, raw_config("classic"), "nvfp4-experts", 0)
    with caplog.at_level("INFO", "dsv4"):
        assert OpenedCheckpoint.open(folder, EngineConfig(max_context=64), 10**11).draft is None
    assert "drafts" not in caplog.text


def test_auto_takes_no_module_that_has_no_place(brought: Path) -> None:
    on_gpu = EngineConfig(max_context=64, prefill_chunk=16)
    off = Engine.plan(brought, dataclasses.replace(on_gpu, draft="off"), gpu_memory=10**11)
    needed = off.devices[0].total_bytes
    assert OpenedCheckpoint.open(brought, on_gpu, needed + 1).draft is None
    # No number of drafts is a fault where there are none.
    counted = dataclasses.replace(on_gpu, draft_tokens=3)
    assert OpenedCheckpoint.open(brought, counted, needed + 1).draft is None
    asked = dataclasses.replace(on_gpu, draft="dspark")
    with pytest.raises(UserError, match="memory: cuda:0 needs"):
        OpenedCheckpoint.open(brought, asked, needed + 1).plan.refuse_if_too_large()
    spread = dataclasses.replace(on_gpu, gpus=4)
    assert OpenedCheckpoint.open(brought, spread, 10**11).draft is None


def test_auto_takes_no_module_where_layers_take_turns_on_the_devices(tmp_path: Path) -> None:
    """Not even one that has a place there, and is taken where it is asked for."""
    folder = tmp_path / "checkpoint"
    write_synthetic(folder, raw_config("classic"), "nvfp4-experts", 0, mtp="classic")
    in_a_row = EngineConfig(max_context=64, prefill_chunk=16, gpus=2)
    assert OpenedCheckpoint.open(folder, in_a_row, 10**11).draft is not None
    in_turn = dataclasses.replace(in_a_row, parallel="round-robin")
    assert OpenedCheckpoint.open(folder, in_turn, 10**11).draft is None
    asked = dataclasses.replace(in_turn, draft="mtp")
    assert OpenedCheckpoint.open(folder, asked, 10**11).draft is not None


def test_auto_takes_no_module_that_is_not_whole(
    brought: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu = EngineConfig(max_context=64, prefill_chunk=16)
    folder = tmp_path / "checkpoint"
    shutil.copytree(brought, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.0.attn.wkv.weight"]
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level("INFO", "dsv4"):
        assert OpenedCheckpoint.open(folder, on_gpu, 10**11).draft is None
    assert "drafts: off, the checkpoint's module cannot run" in caplog.text
    assert "mtp.0.attn.wkv.weight" in caplog.text
    asked = dataclasses.replace(on_gpu, draft="dspark")
    with pytest.raises(UserError, match=r"missing: mtp\.0\.attn\.wkv\.weight"):
        OpenedCheckpoint.open(folder, asked, 10**11)


def test_blocks_that_no_step_has_are_no_matter_without_drafts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    wide = {**raw_config("dspark"), "dspark_block_size": 9}
    write_synthetic(folder, wide, "nvfp4-experts", 0, mtp="dspark")
    for draft in ("off", "auto"):
        found = OpenedCheckpoint.open(folder, EngineConfig(max_context=64, draft=draft), 10**11)
        assert found.draft is None
    with pytest.raises(UserError, match="dspark_block_size: found 9, expected at most 8"):
        OpenedCheckpoint.open(folder, EngineConfig(max_context=64, draft="dspark"), 10**11)


def test_copies_of_embedding_and_head_are_not_looked_at(brought: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(brought, folder)
    tensors = load_file(folder / "model.safetensors")
    copies = {"mtp.0.emb.tok_emb.weight": torch.ones(3), "mtp.0.head.weight": torch.ones(2)}
    save_file({**tensors, **copies}, folder / "model.safetensors")
    asked = EngineConfig(max_context=64, prefill_chunk=16, draft="dspark")
    assert OpenedCheckpoint.open(folder, asked, 10**11).draft is not None


def test_auto_takes_a_module_that_ranks_can_share(brought: Path, tmp_path: Path) -> None:
    """Experts of a module are MXFP4 beside those of NVFP4: in groups twice as large."""
    on_gpus = EngineConfig(max_context=64, prefill_chunk=16, gpus=2, parallel="tensor")
    opened = OpenedCheckpoint.open(brought, on_gpus, 10**11)
    assert opened.draft is not None
    assert opened.steps is not None
    off = Engine.plan(brought, dataclasses.replace(on_gpus, draft="off"), gpu_memory=10**11)
    for with_module, without in zip(opened.plan.devices, off.devices, strict=True):
        assert with_module.weight_bytes > without.weight_bytes
        assert with_module.state_bytes > without.state_bytes
    narrow = {**raw_config("dspark"), "moe_intermediate_size": 32}
    write_synthetic(tmp_path / "narrow", narrow, "nvfp4-experts", 0, mtp="dspark")
    assert OpenedCheckpoint.open(tmp_path / "narrow", on_gpus, 10**11).draft is None
    asked = dataclasses.replace(on_gpus, draft="dspark")
    with pytest.raises(UserError, match=r"expected EngineConfig.parallel='pipeline' \(mtp\.0\."):
        OpenedCheckpoint.open(tmp_path / "narrow", asked, 10**11)
