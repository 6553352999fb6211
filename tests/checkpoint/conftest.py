"""Synthetic folders, written once per session and never changed."""

from pathlib import Path

import pytest

from dsv4.checkpoint import Layout, tiny_config, write_synthetic


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
