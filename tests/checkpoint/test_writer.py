"""Writing shards: progress by piece, and no byte where there is not enough room."""

import errno
import json
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.checkpoint.shard import read_header
from dsv4.checkpoint.writer import (
    OutputTensor,
    StoredType,
    lay_out_file,
    new_file,
    new_folder,
    remove_leftovers,
    write_json,
    write_shards,
)
from dsv4.errors import UserError


def in_pieces(name: str, count: int) -> OutputTensor:
    """``count`` rows of 100 bytes, produced one by one."""
    row = torch.zeros(1, 100, dtype=torch.uint8)
    return OutputTensor(name, torch.uint8, (count, 100), lambda: [row] * count)


def test_texts_of_json_are_written_whatever_they_hold(tmp_path: Path) -> None:
    value = {"\udcff": ["\ud800", "\U0001f600", 'a "\\ \n']}
    write_json(tmp_path / "x", value)
    text = (tmp_path / "x").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "\U0001f600" in text


def test_every_tensor_begins_where_its_elements_are_aligned() -> None:
    """Readers view the bytes in place."""
    dtypes = (torch.uint8, torch.bfloat16, torch.int64, torch.float32)
    tensors = {str(number): StoredType(dtype, (3,)) for number, dtype in enumerate(dtypes)}
    _, offsets = lay_out_file(tensors, {"format": "pt"})
    assert offsets.keys() == tensors.keys()
    assert [offsets[name] % tensors[name].dtype.itemsize for name in tensors] == [0] * 4


def test_progress_is_told_of_every_piece_across_shards(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tensors = [in_pieces("a", 3), in_pieces("b", 2)]
    write_shards(tmp_path, tensors, 300, lambda done, total: told.append((done, total)))
    assert told == [(100 * piece, 500) for piece in range(1, 6)]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_shard_may_be_full_to_its_last_byte(tmp_path: Path) -> None:
    write_shards(tmp_path, [in_pieces(name, 1) for name in "abcd"], 300)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(read_header(file)) for file in files] == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(("free", "fits"), [(500, True), (499, False)])
def test_room_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 10**9))
    huge = OutputTensor("a", torch.uint8, (500 * 10**9,), list)

    def write() -> None:
        with new_folder(tmp_path / "new") as folder:
            write_shards(folder, [huge])

    if fits:
        with pytest.raises(AssertionError):  # The tensor has fewer bytes than it said.
            write()
    else:
        with pytest.raises(UserError) as caught:
            write()
        found = "found 499.0 GB free, expected at least 500.0 GB"
        assert str(caught.value) == f"{tmp_path}: {found}"
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_can_be_read_by_others(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new"):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        with new_folder(folder):
            # Another process is faster.
            folder.mkdir()
            (folder / "file").touch()

    with pytest.raises(UserError, match=r"^/proc/new: cannot be written \(No such file or dir"):
        make(Path("/proc/new"))
    with pytest.raises(UserError, match=r"/new: cannot be written \(Directory not empty\)$"):
        make(tmp_path / "new")
    assert [file.name for file in tmp_path.rglob("*")] == ["new", "file"]


def test_several_threads_write_the_same_files(tmp_path: Path) -> None:
    tensors = [
        OutputTensor(f"t{at}", torch.int64, (at,), lambda at=at: iter([torch.arange(at)]))
        for at in range(1, 40)
    ]
    seen: list[tuple[int, int]] = []
    for writers in (1, 5):
        folder = tmp_path / f"by {writers}"
        folder.mkdir()
        write_shards(folder, tensors, 400, lambda *state: seen.append(state), writers)
    files = sorted((tmp_path / "by 1").iterdir())
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "by 5" / file.name).read_bytes() == file.read_bytes()
    total = sum(tensor.nbytes for tensor in tensors)
    assert [state for state in seen if state[0] == total] == [(total, total)] * 2


def test_an_error_of_one_thread_ends_the_others(tmp_path: Path) -> None:
    produced: list[int] = []

    def produce(at: int) -> Iterator[torch.Tensor]:
        for _ in range(1000):
            produced.append(at)
            time.sleep(0.001)
            if at == 3 and produced.count(3) == 20:
                raise ZeroDivisionError
            yield torch.zeros(1)

    tensors = [
        OutputTensor(f"t{at}", torch.float32, (1000,), partial(produce, at)) for at in range(6)
    ]
    with pytest.raises(ZeroDivisionError):
        write_shards(tmp_path, tensors, 4000, writers=4)
    assert len(produced) < 1000


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a" * 300, "File name too long"), ("loop", "Too many levels of symbolic links")],
)
def test_a_name_that_cannot_be_written_is_named(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(UserError, match=rf"/{name}: cannot be written \({problem}\)$"),
        new_file(tmp_path / name, 1),
    ):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["loop"]


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    killed = """
import os, signal, sys
from pathlib import Path
from dsv4.checkpoint.writer import new_file
with new_file(Path(sys.argv[1]) / "state", 9) as file:
    file.write(b"beginning")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False, timeout=120)
    (leftover,) = tmp_path.iterdir()
    assert leftover.read_bytes() == b"beginning"
    (tmp_path / ".dsv4-new-notes").touch()
    with new_file(tmp_path / "whole", 1) as file:
        remove_leftovers(tmp_path)
        file.write(b"a")
    assert {one.name for one in tmp_path.iterdir()} == {".dsv4-new-notes", "whole"}


def test_a_disk_that_became_read_only_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a file that is not there cannot even be removed."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    problem = r"/state: cannot be written \(Read-only file system\)$"
    with pytest.raises(UserError, match=problem), new_file(tmp_path / "state", 1):
        pass
