"""The header of a trace file: where its values come from (traces.md#metadata)."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import dsv4
from dsv4 import Engine
from dsv4.trace.write import write_trace
from tests.model.tiny import random_ids, tiny_engine

IDS = random_ids(4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64)


def metadata_of(engine: Engine, path: Path, model: str = "tiny") -> dict[str, str]:
    write_trace(engine, IDS, path, at=["hidden"], prompt_tokens=3, model=model)
    with safe_open(path, "pt") as file:
        return file.metadata()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def test_the_header_says_where_the_values_come_from(engine: Engine, tmp_path: Path) -> None:
    metadata = metadata_of(engine, tmp_path / "trace.safetensors")
    assert metadata["format"] == "dsv4-trace/1"
    assert metadata["engine"] == "dsv4"
    assert (metadata["model"], metadata["form"]) == ("tiny", "torch")
    assert metadata["prompt_tokens"] == "3"
    assert json.loads(metadata["config"])["hidden_size"] == engine.config.hidden_size
    settings = json.loads(metadata["settings"])
    assert set(settings) == {*vars(engine.engine_config), "devices"}
    assert settings["kv_dtype"] == engine.engine_config.kv_dtype
    assert (settings["devices"], settings["cuda_graph"]) == (["cpu"], None)


def test_the_header_has_the_versions_of_what_is_installed(engine: Engine, tmp_path: Path) -> None:
    packages = ("transformers", "nvidia-cutlass-dsl", "cuda-core")
    others = {package: installed(package) for package in packages}
    assert json.loads(metadata_of(engine, tmp_path / "trace.safetensors")["versions"]) == {
        "dsv4": dsv4.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: found for package, found in others.items() if found is not None},
    }


def test_a_model_may_have_a_name_that_is_no_utf_8(engine: Engine, tmp_path: Path) -> None:
    metadata = metadata_of(engine, tmp_path / "trace.safetensors", model="a\udcff")
    assert metadata["model"] == r"a\udcff"
