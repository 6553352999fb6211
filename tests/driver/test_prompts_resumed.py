"""``--prompts`` that was ended in the middle: nothing is lost, nothing is there twice, and a file
of something else is left as it is.
"""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4.cli.prompts.answer_file import AnswerFile
from tests.driver.conftest import Result
from tests.driver.drive import Drive
from tests.driver.test_prompts import read_lines, write_lines

Start = Callable[..., subprocess.Popen[bytes]]
Ask = Callable[..., Result]
LINES = [
    {"prompt": "a", "temperature": 0, "max_tokens": 3},
    {"id": "\u2028 ü", "prompt": "b", "seed": 1, "max_tokens": 3},
    {"id": -7, "prompt": "c", "seed": 2, "max_tokens": 3, "raw": True},
]


@pytest.fixture
def ask(drive: Drive, tmp_path: Path) -> Ask:
    """Runs ``LINES``, or others, with the files ``prompts`` and ``out`` of the test's folder."""

    def run(*flags: object, lines: list[dict[str, object]] = LINES) -> Result:
        prompts = write_lines(tmp_path / "prompts", lines)
        return drive("--prompts", prompts, "--out", tmp_path / "out", "--ignore-eos", *flags)

    return run


@pytest.fixture
def whole(ask: Ask, tmp_path: Path) -> bytes:
    """What a run that nothing ends writes to ``out``, which is gone again."""
    ask()
    out = tmp_path / "out"
    content = out.read_bytes()
    out.unlink()
    return content


@pytest.mark.slow
def test_a_run_goes_on_wherever_a_write_was_torn(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ask()
    whole = out.read_bytes()
    second = whole.index(b"\n") + 1
    third = whole.index(b"\n", second) + 1
    for length in (0, 1, second - 1, second + 30, third - 1, third + 200):
        out.write_bytes(whole[:length])
        result = ask()
        assert (result.code, out.read_bytes()) == (0, whole)
        there = whole[:length].count(b"\n")
        before = f" · there before {there}" if there else ""
        assert result.err.startswith(f"answered {3 - there} · failed 0{before} · prompts ")


def test_what_is_complete_is_not_even_loaded(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    whole = (tmp_path / "out").read_bytes()
    monkeypatch.delattr("dsv4.engine.Engine.load")
    result = ask()
    assert result.code == 0
    assert result.err.startswith("answered 0 · failed 0 · there before 3 · ")
    assert (tmp_path / "out").read_bytes() == whole


def test_lines_may_be_added_moved_and_changed_until_they_are_answered(
    ask: Ask, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ask(lines=LINES[1:])
    whole = out.read_bytes()
    first, second = whole.splitlines(keepends=True)
    out.write_bytes(first + second[:100])
    changed = {**LINES[2], "prompt": "another"}
    assert ask(lines=[changed, {**LINES[0], "id": "new"}, LINES[1]]).code == 0
    assert out.read_bytes().startswith(first)
    assert [answer["id"] for answer in read_lines(out)] == ["\u2028 ü", -7, "new"]
    assert read_lines(out)[1]["request"] != json.loads(second)["request"]


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ([LINES[0], {**LINES[1], "prompt": "B"}, LINES[2]], [], "line 2: request: found id '"),
        ([LINES[0], {**LINES[1], "seed": 2}, LINES[2]], [], "line 2: request: found id '"),
        (LINES, ["--top-p", 0.5], "line 2: request: found id '"),
        (LINES, ["--draft-weights", "module"], "line 2: request: found id '"),
        (LINES, ["--draft-tokens", 2], "line 2: request: found id '"),
        (LINES, ["--compute-dtype", "float32"], "line 1: request: found id 1 answered for another"),
        (LINES[:2], [], "line 3: id: found -7, which"),
    ],
)
def test_answers_to_something_else_are_refused_and_kept(
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[dict[str, object]],
    flags: list[object],
    message: str,
) -> None:
    out = tmp_path / "out"
    ask()
    with out.open("ab") as file:
        file.write(b'{"id": ')
    there = out.read_bytes()
    monkeypatch.delattr("dsv4.engine.Engine.load")
    ask(*flags, lines=lines).assert_user_error(f"--out: {out}: {message}")
    assert out.read_bytes() == there


@pytest.mark.parametrize("context", [8, 10, 40])
def test_answers_in_another_context_are_refused_and_kept(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """In 9 tokens the first answer is cut, and the second has just room."""
    out = tmp_path / "out"
    lines: list[dict[str, object]] = [
        {"prompt": "a", "raw": True, "max_tokens": 30, "temperature": 0},
        {"prompt": "a", "raw": True, "max_tokens": 8, "temperature": 0},
    ]
    ask("--max-context", 9, lines=lines)
    assert [answer["finish_reason"] for answer in read_lines(out)] == ["context", "length"]
    there = out.read_bytes()
    monkeypatch.delattr("dsv4.engine.Engine.load")
    assert ask("--max-context", 9, lines=lines).code == 0
    found = f"{out}: line 1: tokens: found id 1 answered in another context than --max-context"
    ask("--max-context", context, lines=lines).assert_user_error(found, f" {context} tokens")
    assert out.read_bytes() == there


def test_a_seed_near_the_end_of_the_context_goes_with_it(ask: Ask, tmp_path: Path) -> None:
    """There is no room for as many drafts there."""
    lines: list[dict[str, object]] = [{"prompt": "a", "raw": True, "max_tokens": 8, "seed": 1}]
    for context, codes in ((12, (0, 2)), (17, (0, 0))):
        ask("--max-context", context, lines=lines)
        assert (
            tuple(ask("--max-context", most, lines=lines).code for most in (context, 40)) == codes
        )
        (tmp_path / "out").unlink()


def test_a_whole_answer_counts_in_every_context_that_holds_it(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, object]] = [
        {"prompt": "a", "raw": True, "max_tokens": 8, "temperature": 0}
    ]
    ask("--max-context", 9, lines=lines)
    assert read_lines(tmp_path / "out")[0]["tokens"] == {"prompt": 2, "completion": 8}
    monkeypatch.delattr("dsv4.engine.Engine.load")
    assert ask("--max-context", 40, lines=lines).code == 0
    assert ask("--max-context", 9, lines=lines).code == 0
    message = "line 1: tokens: found id 1 answered in another context than --max-context makes, of"
    ask("--max-context", 8, lines=lines).assert_user_error(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"notes", "line 1: found no line break and no beginning of an answer to --prompts"),
        (b'{"id": 1, "prompt": "a"}', "line 1: found no line break and no beginning"),
        (b'{"id": 1, "prompt": "a"}\n', "line 1: found no id and request, expected an answer"),
        (b"notes\n", "line 1: not valid JSON (Expecting value at column 1)"),
        (b"\xff\n", "line 1: byte 0 is not UTF-8"),
        (b"\n", "line 1: not valid JSON"),
        (b'{"id": true, "request": ""}\n', "line 1: id: found True, which"),
        (b'{"id": [1], "request": ""}\n', "line 1: id: found [1], which"),
        (b'{"id": "1", "request": ""}\n', "line 1: id: found '1', which"),
        (b'{"id": 1, "request": ""}\n', "line 1: request: found id 1 answered for another"),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(
    ask: Ask, tmp_path: Path, content: bytes, message: str
) -> None:
    out = tmp_path / "out"
    out.write_bytes(content)
    ask().assert_user_error(f"--out: {out}: {message}")
    assert out.read_bytes() == content


def test_an_id_that_is_answered_twice_is_refused(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ask()
    out.write_bytes(out.read_bytes() + out.read_bytes())
    ask().assert_user_error(f"--out: {out}: line 4: id: found 1 a second time, expected one")


def test_two_processes_do_not_share_a_file(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ask().assert_user_error(f"--out: {out}: another process is writing answers to it")
    assert ask().code == 0


def test_a_folder_without_locks_is_refused(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("dsv4.cli.prompts.answer_file.fcntl.flock", flock)
    out = tmp_path / "out"
    ask().assert_user_error(f"--out: {out}: cannot be locked (No locks available)")


@pytest.mark.parametrize(
    "name", ["-", "/", "/dev/null", "/no/such/folder/out", "fifo", "read-only"]
)
def test_answers_go_to_a_regular_file(drive: Drive, tmp_path: Path, name: str) -> None:
    prompts = write_lines(tmp_path / "prompts", LINES)
    path = Path(name) if name[0] in "-/" else tmp_path / name
    if name == "fifo":
        os.mkfifo(path)
    if name == "read-only":
        path.touch(mode=0o444)
    drive("--prompts", prompts, "--out", path).assert_user_error(f"--out: {path}: ")


def test_a_full_disk_is_one_line_and_the_run_can_go_on(
    ask: Ask, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    written = []

    def full(descriptor: int, data: bytes) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(data)
        return write(descriptor, data[:50])

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("dsv4.cli.prompts.answer_file.os.write", full)
        result = ask("--quiet")
    result.assert_user_error(f"--out: {out}: cannot be written (No space left on device)")
    assert out.read_bytes() == whole[:50]
    assert ask().code == 0
    assert out.read_bytes() == whole


def test_ctrl_c_leaves_out_the_answer_under_way(
    ask: Ask, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    append = AnswerFile.append

    def interrupted(answers: AnswerFile, *arguments: object) -> None:
        if answers.failed:
            raise KeyboardInterrupt
        append(answers, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "append", interrupted)
        result = ask()
    assert result.code == 130
    assert result.err.startswith("answered 1 · failed 0 · ")
    assert result.err.endswith(" s · interrupted\n")
    assert out.read_bytes() == whole[: whole.index(b"\n") + 1]
    assert ask().code == 0
    assert out.read_bytes() == whole


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_file_of_an_unbroken_run(
    start: Start, drive: Drive, tmp_path: Path
) -> None:
    lines = [{"id": f"{seed}", "prompt": "a", "seed": seed, "max_tokens": 20} for seed in range(5)]
    prompts = write_lines(tmp_path / "prompts", lines)
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = ("--prompts", prompts, "--ignore-eos", "--device", "cpu", "--out")
    assert drive(*flags, whole).code == 0
    process = start(*flags, out)
    while not out.exists() or out.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < out.stat().st_size < whole.stat().st_size
    resumed = start(*flags, out)
    _, err = resumed.communicate()
    assert (resumed.returncode, b" \xc2\xb7 there before " in err) == (0, True)
    assert out.read_bytes() == whole.read_bytes()
