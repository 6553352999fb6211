"""Output files: what a path is decides how it is written, and nothing else is replaced."""

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4.command.output_file import (
    check_output,
    check_regular_output,
    check_replaced_output,
    refuse_shared_files,
    write_output,
)
from dsv4.errors import UserError
from tests.source_rules import ROOT


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_is_written_whole_in_utf8(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check_output("--json", path)
    assert names(tmp_path) == []
    write_output("--json", path, '{"text": "漢字\\n"}\n')
    assert path.read_text(encoding="utf-8") == '{"text": "漢字\\n"}\n'
    assert names(tmp_path) == ["report.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "target.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    for text in ("new", "newer"):  # At first the link leads nowhere.
        check_output("--json", link)
        write_output("--json", link, text)
        assert (link.is_symlink(), target.read_text()) == (True, text)
    assert names(tmp_path / "there") == ["target.json"]


def test_mode_and_owner_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "private.json"
    path.touch(0o600)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    before = path.stat()
    write_output("--json", path, "text")
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino  # Replaced, so that nobody reads half a file.


def test_an_owner_that_cannot_be_kept_is_kept_by_writing_into_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    path = tmp_path / "foreign.json"
    path.touch()
    inode = path.stat().st_ino
    monkeypatch.setattr(Path, "chmod", refuse)
    write_output("--json", path, "text")
    assert (path.stat().st_ino, path.read_text()) == (inode, "text")
    assert names(tmp_path) == ["foreign.json"]


def test_other_names_of_a_file_see_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_text("long old content")
    (tmp_path / "two").hardlink_to(path)
    write_output("--json", path, "new")
    assert (tmp_path / "two").read_text() == "new"


def test_a_fifo_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_output("--json", path)  # Opens nothing: nobody reads yet.
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_output("--json", path, "text")
    reader.join()
    assert read == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser makes devices")
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_text("")
    except OSError as error:
        pytest.skip(f"no devices here: {error}")
    check_output("--json", path)
    write_output("--json", path, "text")
    assert stat.S_ISCHR(path.stat().st_mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "out.txt"])
def test_standard_output_gets_it_behind_what_was_printed(tmp_path: Path, name: str) -> None:
    """Also where it is a file: replaced or opened anew it would lose the text."""
    script = (
        "import sys; from pathlib import Path; from dsv4.command.output_file import write_output\n"
        "print('text'); write_output('--json', Path(sys.argv[1]), 'report\\n'); print('more')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out.txt").open("wb") as out:
        command = [sys.executable, "-c", script, name]
        subprocess.run(command, check=True, stdout=out, cwd=tmp_path, env=environment)
    assert (tmp_path / "out.txt").read_text() == "text\nreport\nmore\n"
    assert names(tmp_path) == ["out.txt"]


def test_refused_beforehand_and_left_as_they_are(tmp_path: Path) -> None:
    protected = tmp_path / "protected.json"
    protected.write_text("old")
    protected.chmod(0o444)
    for path, message in (
        (protected, "found a read-only file"),
        (tmp_path, "found a folder, expected a file name"),
        (tmp_path / "gone" / "x.json", "its folder does not exist"),
        (tmp_path / ("x" * 300), "File name too long"),
        (protected / "x.json", "Not a directory"),
    ):
        for refused in (
            lambda path=path: check_output("--json", path),
            lambda path=path: write_output("--json", path, "new"),
        ):
            with pytest.raises(UserError) as caught:
                refused()
            assert str(caught.value).startswith(f"--json: {path}: ")
            assert message in str(caught.value)
    assert protected.read_text() == "old"
    assert names(tmp_path) == ["protected.json"]


def test_a_full_disk_is_noticed_beforehand_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device"):
        check_output("--json", path)
    assert (path.read_text(), names(tmp_path)) == ("old", ["report.json"])


def test_a_name_that_is_not_utf8_and_text_with_lone_surrogates(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.json")
    check_output("--json", path)
    write_output("--json", path, '"\udcff"')
    assert path.read_bytes() == rb'"\udcff"'


def test_an_interrupt_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_output("--json", path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["report.json"])


def test_a_file_that_is_made_anew_needs_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "there"
    path.touch()
    check_replaced_output("--trace", path)
    assert names(tmp_path) == ["there"]

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # The superuser may write into every folder.
    monkeypatch.setattr(os, "access", lambda place, _: Path(place) != tmp_path)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    for check in (check_output, check_regular_output):
        check("--out", path)
    expected = f"--trace: {path}: cannot be written \\(Permission denied\\)"
    with pytest.raises(UserError, match=expected):
        check_replaced_output("--trace", path)


def test_a_file_that_is_made_anew_is_no_standard_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "said"
    for name in ("stdout", "stderr"):
        with path.open("w") as said:
            monkeypatch.setattr(sys, name, said)
            with pytest.raises(UserError, match=f"--trace: {path}: found the file that stdout or"):
                check_replaced_output("--trace", path)
            monkeypatch.undo()
    check_replaced_output("--trace", path)


@pytest.mark.parametrize("check", [check_regular_output, check_replaced_output])
def test_what_can_be_nothing_but_a_regular_file_is_no_stream_and_no_pipe(
    tmp_path: Path, check: Callable[[str, Path], None]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("-"), tmp_path / "pipe"):
        with pytest.raises(UserError, match=f"^--trace: {path}: found no regular file, expected"):
            check("--trace", path)


def test_a_block_device_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat, "S_ISBLK", stat.S_ISREG)  # Not everybody may make one.
    path = tmp_path / "disk"
    path.write_text("old")
    for work in (check_output, lambda flag, file: write_output(flag, file, "text")):
        with pytest.raises(UserError, match=f"^--json: {path}: found a block device or a socket"):
            work("--json", path)
    assert path.read_text() == "old"


@pytest.mark.parametrize("check", [check_regular_output, check_replaced_output])
def test_a_name_that_is_too_long_is_named_with_its_flag(
    tmp_path: Path, check: Callable[[str, Path], None]
) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(
        UserError, match=f"^--trace: {path}: cannot be written \\(File name too long"
    ):
        check("--trace", path)


def test_a_file_by_another_of_its_names_is_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    names = [tmp_path / "hard", tmp_path / "soft", tmp_path / "x" / ".." / "a"]
    names[0].hardlink_to(file)
    names[1].symlink_to(file)
    (tmp_path / "x").mkdir()
    for name in names:
        with pytest.raises(UserError, match=r"--json: .*: found the file of --tools, expected"):
            refuse_shared_files([("--tools", file)], [("--json", name)])


def test_a_model_gets_no_new_shard(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (model / "a.safetensors", tmp_path / "model/../model/a.safetensors"):
        with pytest.raises(UserError, match=r"--trace: .*: found a new shard of --model, expected"):
            refuse_shared_files([], [("--trace", path)], model)
    for path in (model / "a.json", tmp_path / "a.safetensors"):
        refuse_shared_files([], [("--trace", path)], model)


def test_a_draft_module_is_not_written_over(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    draft = ("--draft-weights", tmp_path)
    with pytest.raises(UserError, match="--json: .*: found the file of --draft-weights, expected"):
        refuse_shared_files([], [("--json", weights)], tmp_path / "model", draft)
    with pytest.raises(UserError, match="found a new shard of --draft-weights, expected another"):
        refuse_shared_files([], [("--trace", tmp_path / "a.safetensors")], None, draft)


def test_files_that_are_only_read_and_devices_may_be_shared(tmp_path: Path) -> None:
    file = tmp_path / "a"
    null = Path("/dev/null")
    read = [("--tools", file), ("--messages", file), ("--prompt-file", Path("-")), ("--x", None)]
    refuse_shared_files(read, [("--json", null), ("--svg", null), ("--out", Path("-"))])
