"""The rule of all commands: exit codes, one line, signals, closed streams."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dsv4.command.program import command
from dsv4.command.signals import Stopped
from dsv4.errors import UserError


def run(error: BaseException | None, code: int = 0) -> int:
    @command
    def main() -> int:
        if error is not None:
            raise error
        return code

    return main()


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_command_returns_is_its_exit_code(code: int) -> None:
    assert run(None, code) == code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("EngineConfig.gpus: found\n3"), "error: --gpus: found 3"),
        (FileNotFoundError(2, "No such file", "/x/y"), "error: /x/y: No such file"),
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (FloatingPointError("the logits contain NaN"), "error: the logits contain NaN"),
        (MemoryError(), "error: memory: ran out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error: memory: ran out of memory"),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB. GPU 1 has a total"
            ),
            "error: memory: cuda:1 ran out of memory",
        ),
        (RuntimeError("CUDA error: x\nadvice"), "error: CUDA: x"),
    ],
)
def test_errors_that_are_not_the_programs_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert run(error) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), AssertionError()])
def test_faults_of_the_program_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(error)


@pytest.mark.parametrize(
    ("stop", "code", "line"),
    [
        (KeyboardInterrupt(), 130, ""),
        (Stopped(signal.SIGINT), 130, ""),
        (Stopped(signal.SIGTERM), 143, "ended by SIGTERM\n"),
        (Stopped(signal.SIGHUP), 129, "ended by SIGHUP\n"),
    ],
)
def test_signals_have_their_codes(
    stop: KeyboardInterrupt, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stop) == code
    assert capsys.readouterr().err == line


PROGRAM = """
import sys, time
from dsv4.command.program import command, run_program

@command
def main():
    {body}
    return 0

run_program(main)
"""
WAITING = "print('ready', flush=True); time.sleep(60)"


def start(body: str, **settings: object) -> subprocess.Popen[str]:
    script = PROGRAM.format(body=body)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    return subprocess.Popen([sys.executable, "-c", script], **pipes)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_or_many_end_a_program_alike(number: signal.Signals) -> None:
    body = f"try: {WAITING}\n    finally: time.sleep(0.3); print('cleaned')"
    for times in (1, 5):
        process = start(body)
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.01)
        out, err = process.communicate()
        expected = "" if number == signal.SIGINT else f"ended by {number.name}\n"
        assert (process.returncode, out, err) == (128 + number, "cleaned\n", expected)


@pytest.mark.slow
def test_a_signal_to_a_program_that_has_ended_its_work_changes_nothing() -> None:
    leave = "print('ready', flush=True), time.sleep(0.3), os._exit(code)"
    process = start(f"import os, dsv4.command.program as p; p.leave = lambda code: ({leave})")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_a_program_that_does_not_end_is_ended_by_a_later_signal() -> None:
    body = "import dsv4.command.signals as s; s.PATIENCE_SECONDS = 0\n    " + (
        "try: print('ready', flush=True); time.sleep(60)\n"
        "    finally: print('cleaning', flush=True); time.sleep(60)"
    )
    process = start(body)
    assert process.stdout is not None
    for line in ("ready\n", "cleaning\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


@pytest.mark.slow
def test_a_fault_has_a_traceback_and_a_code_of_its_own() -> None:
    process = start("raise ZeroDivisionError")
    _, err = process.communicate()
    assert process.returncode == 3
    assert err.startswith("Traceback")


@pytest.mark.slow
def test_a_fault_of_fire_b200_test_is_no_failed_test() -> None:
    code = "from dsv4.validate import harness; harness.main = lambda: 1 / 0; harness.program()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 3
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_closed_standard_streams_are_empty_ones(number: int) -> None:
    body = "sys.stdin.read(); print('out'); print('err', file=sys.stderr)"
    process = start(body, stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(number))
    out, err = process.communicate()
    assert process.returncode == 0
    assert (out, err) == ("" if number == 1 else "out\n", "" if number == 2 else "err\n")


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        process = start("print('text')", stdout=full, env=buffered)
        _, err = process.communicate()
    assert (process.returncode, err) == (2, "error: stdout: No space left on device\n")


@pytest.mark.slow
def test_a_reader_that_leaves_a_help_has_seen_enough() -> None:
    process = start(
        "sys.stdin.read(); from dsv4.command.flags import OneLineParser; "
        "OneLineParser().parse_args(['--help'])",
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error() -> None:
    process = start("sys.stdin.read(); print('text')", stdin=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == ("", 141)
