"""The folder of packed weights: made where there is none, or refused."""

import os
from pathlib import Path

import pytest

from dsv4 import UserError
from dsv4.checkpoint.packed_cache import check_folder
from tests.checkpoint.packed_starts import Starts


def test_no_folder_is_one_line_before_anything_is_packed(starts: Starts) -> None:
    file = starts.cache
    file.write_text("x")
    found = f"EngineConfig.packed_cache: {file}: found a file, expected a folder"
    with pytest.raises(UserError, match=f"^{found}$"):
        starts()
    starts.cache = file / "in a file"
    expected = r"^EngineConfig.packed_cache: .*in a file: cannot be written \([^()\n]*\)$"
    with pytest.raises(UserError, match=expected):
        starts()


def test_a_folder_that_others_own_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.access", lambda _, mode: asked.append(mode))
    expected = f"^EngineConfig.packed_cache: {tmp_path}: cannot be written .Permission denied.$"
    with pytest.raises(UserError, match=expected):
        check_folder(tmp_path)
    assert asked == [os.W_OK | os.X_OK]


def test_the_folder_is_made_with_those_above_it(starts: Starts) -> None:
    starts.cache = starts.cache / "new" / "deep"
    starts()
    assert len(starts.entries) == 1


@pytest.mark.parametrize("linked", ["cache", "folder"])
def test_the_folder_of_the_model_is_refused(starts: Starts, tmp_path: Path, linked: str) -> None:
    """By whichever name either of them is given."""
    model = starts.folder
    before = sorted(model.iterdir())
    link = tmp_path / "link"
    link.symlink_to(model)
    starts.folder, starts.cache = (link, model) if linked == "folder" else (model, link)
    expected = f"^EngineConfig.packed_cache: {starts.cache}: found the folder of the model, expec"
    with pytest.raises(UserError, match=expected):
        starts()
    assert sorted(model.iterdir()) == before
