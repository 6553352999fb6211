"""Compiling every kernel for every architecture takes minutes, so these tests are left out of ``make check``."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_compile_"):
            item.add_marker(pytest.mark.slow)
