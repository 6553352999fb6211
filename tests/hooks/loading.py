"""Loads a file of docs/hooks as somebody's engine would: beside the writer, by its name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.source_rules import ROOT

HOOKS = ROOT / "docs/hooks"


def load_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fresh module of ``docs/hooks/NAME.py``; nothing of it stays in ``sys.modules``."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.delitem(sys.modules, "trace_writer", raising=False)
    spec = importlib.util.spec_from_file_location(name, HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "trace_writer")
    return module


def config_folder(folder: Path, text: str = '{"vocab_size": 11}') -> Path:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
