"""Trace files: what they hold, how they appear, and what an error leaves behind."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsv4 import Engine, UserError
from dsv4.trace.file import TraceFile, _copy
from dsv4.trace.write import write_trace
from tests.model.tiny import random_ids, tiny_engine

IDS = random_ids(21)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=8)


def test_a_file_holds_the_values_of_the_trace(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(engine, IDS, path, prompt_tokens=18)
    expected = engine.trace(IDS, prompt_tokens=18)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(expected)
        for name, rows in expected.items():
            assert torch.equal(file.get_tensor(name), rows), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.safetensors"]


def test_ids_are_what_an_engine_takes(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(engine, (token for token in IDS[:3]), path, at=["hidden"])  # type: ignore[arg-type]
    with safe_open(path, "pt") as file:
        assert file.get_tensor("token_ids").tolist() == IDS[:3]
    with pytest.raises(UserError, match="token_ids: found None, expected integers"):
        write_trace(engine, None, tmp_path / "none.safetensors")  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.safetensors"]


def test_chosen_values_come_with_tokens_and_positions(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(engine, IDS, path, at=["layers.2.streams"])
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"layers.2.streams", "positions", "token_ids"}
        assert file.get_tensor("token_ids").tolist() == IDS
        assert file.get_tensor("positions").tolist() == list(range(len(IDS)))


def test_what_is_in_every_file_may_be_asked_for(engine: Engine) -> None:
    always = {"positions", "token_ids"}
    assert set(engine.trace(IDS[:3], at=["token_ids"])) == always
    assert set(engine.trace(IDS[:3], at=["positions", "hidden"])) == {*always, "hidden"}


def steps(file: TraceFile, count: int) -> None:
    for position in range(count):
        file.add("hidden", torch.full((1, 4), float(position)))
        file.add("token_ids", torch.tensor([position]))


def broken_off(path: Path, count: int, error: type[BaseException]) -> None:
    with TraceFile(path, {}, 8, 4) as file:
        steps(file, count)
        file.add("hidden", torch.ones(1, 4))
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError, FloatingPointError])
def test_an_interrupted_trace_holds_the_steps_that_ended(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "trace.safetensors"
    with pytest.raises(error):
        broken_off(path, 3, error)
    with safe_open(path, "pt") as found:
        assert found.get_tensor("token_ids").tolist() == [0, 1, 2]
        assert found.get_tensor("hidden")[:, 0].tolist() == [0, 1, 2]
        assert found.metadata()["prompt_tokens"] == "3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.safetensors"]


@contextmanager
def interrupted_at(line: int, *codes: CodeType) -> Iterator[None]:
    """In the block the ``line``-th line that runs of ``codes`` is interrupted before it begins."""
    passed = 0

    def interrupt(_: Any, event: str, __: Any) -> Any:
        nonlocal passed
        passed += event == "line"
        if passed == line:
            sys.settrace(before)
            raise KeyboardInterrupt
        return interrupt

    def follow(frame: FrameType, _: str, __: Any) -> Any:
        return interrupt if frame.f_code in codes else None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", range(1, 8))
def test_an_interruption_as_a_step_ends_leaves_as_many_rows_of_every_value(
    tmp_path: Path, line: int
) -> None:
    path = tmp_path / "trace.safetensors"
    with suppress(KeyboardInterrupt), TraceFile(path, {}, 8, 4) as file:
        steps(file, 2)
        file.add("hidden", torch.ones(1, 4))
        with interrupted_at(line, TraceFile._end_step.__code__):
            file.add("token_ids", torch.tensor([2]))
    with safe_open(path, "pt") as found:
        ids = found.get_tensor("token_ids").tolist()
        assert ids in ([0, 1], [0, 1, 2])
        assert len(found.get_tensor("hidden")) == len(ids)


@pytest.mark.parametrize("line", range(2, 8))
@pytest.mark.parametrize("count", [0, 3])
def test_an_interruption_as_the_block_ends_leaves_the_trace_and_no_folder(
    tmp_path: Path, line: int, count: int
) -> None:
    """Line 1 is the ``try`` of ``__exit__``, which nothing guards."""
    path = tmp_path / "trace.safetensors"
    file = TraceFile(path, {}, 8, 4)
    steps(file, count)
    codes = (TraceFile.__exit__.__code__, TraceFile._end.__code__)
    with suppress(KeyboardInterrupt), interrupted_at(line, *codes):
        file.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == ([path] if count else [])


def test_no_folder_is_left_where_the_end_of_the_block_never_began(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.safetensors", {}, 8, 4)
    steps(file, 1)
    with suppress(KeyboardInterrupt), interrupted_at(1, TraceFile.__exit__.__code__):
        file.__exit__(None, None, None)
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_an_end_that_was_asked_for_twice_leaves_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.safetensors"
    file = TraceFile(path, {}, 8, 4)
    steps(file, 2)
    submit = file._writer.submit

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(file._writer, "submit", submit)
        submit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(file._writer, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.__exit__(None, None, None)
    with safe_open(path, "pt") as found:
        assert found.get_tensor("token_ids").tolist() == [0, 1]


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_while_the_trace_is_written_leaves_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.1)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr("dsv4.trace.file._copy", _copy)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        _copy(*arguments)

    monkeypatch.setattr("dsv4.trace.file._copy", interrupted)
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    path = tmp_path / "trace.safetensors"
    with pytest.raises(KeyboardInterrupt), TraceFile(path, {}, 3, 4) as file:
        steps(file, 3)
    with safe_open(path, "pt") as found:
        assert found.get_tensor("hidden")[:, 0].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, b"older"])
def test_an_error_leaves_things_as_they_were(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "trace.safetensors"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(ZeroDivisionError):
        broken_off(path, 2, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt):
        broken_off(path, 0, KeyboardInterrupt)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([before] if before else [])


def test_a_trace_that_the_disk_cannot_hold_is_refused_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = (100, 90, 250)
    monkeypatch.setattr(
        "dsv4.trace.file.shutil.disk_usage", lambda path: type("Usage", (), {"free": usage[2]})
    )
    with TraceFile(tmp_path / "fits", {}, 11, 4) as file:
        steps(file, 11)
    with (
        pytest.raises(UserError, match="expected .* GB for 12 tokens"),
        TraceFile(tmp_path / "large", {}, 12, 4) as file,
    ):
        steps(file, 12)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fits"]


def test_what_a_trace_needs_follows_from_the_tokens_of_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dsv4.trace.file.shutil.disk_usage", lambda path: type("Usage", (), {"free": 64})
    )
    path = tmp_path / "trace.safetensors"
    with TraceFile(path, {}, 8, 4) as file:
        file.add("token_ids", torch.arange(4))
        file.add("token_ids", torch.arange(4, 8))
    with safe_open(path, "pt") as found:
        assert found.get_tensor("token_ids").tolist() == list(range(8))


def test_a_part_shrinks_as_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def unlink(part: Path, missing_ok: bool = False) -> None:
        left.append(part.stat().st_size)
        part.rename(part.with_suffix(".gone"))

    monkeypatch.setattr("dsv4.trace.file._COPIED_BYTES", 1000)
    monkeypatch.setattr(Path, "unlink", unlink)
    path = tmp_path / "trace.safetensors"
    with pytest.raises(KeyboardInterrupt):
        broken_off(path, 300, KeyboardInterrupt)
    assert left == [0, 0]
    with safe_open(path, "pt") as found:
        assert found.get_tensor("hidden")[:, 3].tolist() == list(range(300))
        assert found.get_tensor("token_ids").tolist() == list(range(300))


def test_a_name_may_be_as_long_as_the_disk_takes(tmp_path: Path) -> None:
    path = tmp_path / ("t" * 255)
    with TraceFile(path, {}, 1, 4) as file:
        steps(file, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_followed_and_other_targets_refused(tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(target)
    with TraceFile(link, {}, 1, 4) as file:
        steps(file, 1)
    assert link.is_symlink()
    assert target.is_file()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, message in (
        (tmp_path, "no regular file"),
        (Path("/dev/null"), "no regular file"),
        (tmp_path / "missing" / "x", "no such folder"),
        (loop, f"^{loop}: cannot be written"),
        (Path("/proc/trace"), "^/proc/trace: cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            TraceFile(path, {}, 1, 4)
