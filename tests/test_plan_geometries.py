"""Geometries that the CUDA ops do not take: refused in one line before any weight is read."""

from pathlib import Path

import pytest

from dsv4.checkpoint import tiny_config as tiny_raw_config
from dsv4.checkpoint import write_synthetic
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError


def test_a_geometry_without_cuda_ops_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, tiny_raw_config(index_n_heads=512), "native", 0)
    with pytest.raises(UserError, match=r"geometry .*q_TID: found 512 heads") as it:
        Engine.plan(folder, EngineConfig(device="cuda"), gpu_memory=10**10)
    assert "EngineConfig.ops='torch' takes more" in str(it.value)
    Engine.plan(folder, EngineConfig(device="cuda", ops="torch"), gpu_memory=10**10)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_routed_experts": 641}, "n_routed_experts: found 641, expected at most 640"),
        (
            {"n_routed_experts": 24, "num_experts_per_tok": 17},
            "num_experts_per_tok: found 17, expected at most 16",
        ),
        ({"hc_mult": 9}, "hc_mult: found 9, expected at most 8"),
    ],
)
def test_what_no_cuda_op_takes_is_named_by_its_key(
    keys: dict[str, int], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, tiny_raw_config(**keys), "native", 0)
    advice = "with the CUDA ops; EngineConfig.ops='torch' takes more"
    with pytest.raises(UserError) as it:
        Engine.plan(folder, EngineConfig(device="cuda"), gpu_memory=10**10)
    assert str(it.value) == f"{folder}/config.json: {message} {advice}"
    Engine.plan(folder, EngineConfig(device="cuda", ops="torch"), gpu_memory=10**10)


def test_a_module_without_cuda_ops_is_left_out_where_nobody_asked_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, tiny_raw_config(vocab_size=150_000), "native", 0, mtp="classic")
    with caplog.at_level("INFO", "dsv4"):
        Engine.plan(folder, EngineConfig(device="cuda"), gpu_memory=10**10)
    assert "the checkpoint's module cannot run" in caplog.text
    with pytest.raises(UserError, match="model: found a draft module that the CUDA ops do not"):
        Engine.plan(folder, EngineConfig(device="cuda", draft="mtp"), gpu_memory=10**10)


def test_a_module_is_not_blamed_for_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, tiny_raw_config(index_n_heads=512), "native", 0, mtp="classic")
    with caplog.at_level("INFO", "dsv4"), pytest.raises(UserError, match="found a geometry"):
        Engine.plan(folder, EngineConfig(device="cuda"), gpu_memory=10**10)
    assert "drafts" not in caplog.text
