"""The small model and its trace, which tests of layers share."""

from pathlib import Path

import pytest

from dsv4 import Engine
from dsv4.checkpoint import write_synthetic
from dsv4.trace.write import write_trace
from tests.validate.small_model import CONFIG, SMALL, TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "tiny"
    write_synthetic(folder, SMALL, "nvfp4-experts", 0)
    return folder


@pytest.fixture(scope="module")
def trace_file(model: Path) -> Path:
    path = model.parent / "trace.safetensors"
    write_trace(Engine.load(model, CONFIG), TOKENS, path)
    return path
