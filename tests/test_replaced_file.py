"""Traces and states in the place of older files: what stays of these."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint.writer import new_file
from dsv4.trace.file import TraceFile

Write = Callable[[Path], None]


def write_state(path: Path) -> None:
    with new_file(path, 5) as file:
        file.write(b"state")


def write_trace(path: Path) -> None:
    with TraceFile(path, {}, 1, 1) as file:
        file.add("token_ids", torch.tensor([7]))


@pytest.fixture(params=[write_state, write_trace])
def write(request: pytest.FixtureRequest) -> Write:
    return request.param


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A file of a mode, and of another owner where that can be made."""
    path = tmp_path / "older"
    path.touch()
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    return path


def test_mode_and_owner_stay(write: Write, older: Path) -> None:
    before = older.stat()
    write(older)
    after = older.stat()
    assert after.st_size > 0
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino  # Replaced, so that nobody reads half a file.
    assert list(older.parent.iterdir()) == [older]


def test_other_names_see_what_is_written(write: Write, older: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.hardlink_to(older)
    older.write_bytes(bytes(1 << 12))
    write(older)
    write(tmp_path / "new")
    assert other.samefile(older)
    assert other.read_bytes() == (tmp_path / "new").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "older", "other"]


def test_an_owner_that_cannot_be_given_stays_by_writing_into_the_file(
    write: Write, older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    before = older.stat()
    monkeypatch.setattr(Path, "chmod", refuse)
    write(older)
    after = older.stat()
    assert (after.st_ino, after.st_size > 0) == (before.st_ino, True)
    assert list(older.parent.iterdir()) == [older]
