"""Loads a file of docs/hooks as somebody's engine would, beside the writer and by its name; reads
what it wrote.
"""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from dsv4.validate.joined_trace import JoinedTrace
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
    monkeypatch.delitem(sys.modules, "trace_writer", raising=False)
    return module


def config_folder(folder: Path, text: str = '{"vocab_size": 11}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def stub_distributed(name: str, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's module ``name`` for rank ``rank`` of ``ranks``, in empty packages."""
    module = ModuleType(name)
    for function, value in (("rank", rank), ("world_size", ranks)):
        setattr(module, f"get_tensor_model_parallel_{function}", lambda value=value: value)
    packages = name.split(".")[:-1]
    for depth in range(len(packages)):
        package = ".".join(packages[: depth + 1])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)


def read_joined(paths: list[Path], token_ids: list[int]) -> dict[str, Tensor]:
    """Every value of the files of all ranks, which are of these tokens and agree."""
    with ExitStack() as stack:
        joined = JoinedTrace(paths, stack)
        assert joined.token_ids == token_ids
        found = {name: joined.rows(name, 0, joined.shape(name)[0]) for name in joined.names}
        assert joined.unequal == {}
        return found
