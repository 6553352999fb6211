"""The writer that is copied beside an engine: what its file says of the model, and
that a folder which is none shows before the engine has run.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.hooks.loading import config_folder, load_hook


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config_folder(folder)
    monkeypatch.chdir(folder)
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", ".")
    writer.begin(torch.tensor([5]), torch.tensor([0]))
    path = writer.save(tmp_path / "theirs.safetensors")
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata()["model"] == "tiny"


def test_a_folder_without_a_configuration_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = load_hook("trace_writer", monkeypatch).TraceWriter
    with pytest.raises(FileNotFoundError, match=r"org/name/config\.json"):
        writer("mine", "org/name")
