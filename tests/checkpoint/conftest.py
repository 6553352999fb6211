"""Synthetic folders, written once per session and never changed, and starts of a copy of one."""

import random
import shutil
from pathlib import Path

import pytest

from dsv4.checkpoint import Layout, tiny_config, write_synthetic
from tests.checkpoint.packed_starts import Starts


def _folder(root: pytest.TempPathFactory, layout: Layout) -> Path:
    folder = root.mktemp("synthetic") / layout
    write_synthetic(folder, tiny_config(), layout, seed=1, mtp="classic")
    return folder


@pytest.fixture(scope="session")
def nvfp4_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory, "nvfp4-experts")


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory, "native")


@pytest.fixture(scope="session")
def nvfp4_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory, "nvfp4-all")


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory, "bf16")


@pytest.fixture(scope="session")
def without_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "without_module"
    write_synthetic(folder, tiny_config(), "nvfp4-experts", seed=1)
    return folder


@pytest.fixture
def starts(without_module: Path, tmp_path: Path) -> Starts:
    """Of a checkpoint that a test may change."""
    return Starts(shutil.copytree(without_module, tmp_path / "model"), tmp_path / "cache")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of 5,000 random bytes."""
    paths = [tmp_path / name for name in ("b", "a")]
    for seed, path in enumerate(paths):
        path.write_bytes(random.Random(seed).randbytes(5000))
    return paths
