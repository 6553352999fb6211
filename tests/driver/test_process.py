"""The driver as a process of its own: streaming, Ctrl-C, closed pipes, other directories."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.driver.conftest import DRIVER, read_json

Start = Callable[..., subprocess.Popen[bytes]]
ENDLESS = ("--max-tokens", 20_000, "--ignore-eos", "--seed", 1)

pytestmark = pytest.mark.slow


def read_some(process: subprocess.Popen[bytes]) -> bytes:
    """The first bytes on stdout, as soon as they are there."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 4096)


def test_text_arrives_while_the_model_still_decodes(start: Start) -> None:
    process = start(*ENDLESS)
    assert 0 < len(read_some(process)) < 100  # A token or a few, not a full buffer.
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate()


def test_ctrl_c_keeps_what_was_produced(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = start(*ENDLESS, "--json", path)
    first = read_some(process) + read_some(process) + read_some(process)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate()
    report = read_json(path)
    assert process.returncode == 130
    assert report["finish_reason"] == "interrupted"
    assert report["completion"]["token_ids"]
    # The interrupt may fall between a token's arrival and its display.
    assert report["completion"]["message"]["content"].startswith(
        (first + rest).decode().removesuffix("\n")[:-8]
    )
    assert report["timing"]["decode_tokens"] > 0
    assert err.decode().rstrip("\n").endswith("interrupted")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_however_many_end_a_run_in_order(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "report.json"
    process = start(*ENDLESS, "--json", path)
    read_some(process)
    for _ in range(4):
        process.send_signal(number)
        time.sleep(0.02)
    _, err = process.communicate()
    assert process.returncode == 128 + number
    assert err.decode().rstrip("\n").endswith("interrupted")
    assert err.count(b"\n") == 1
    assert read_json(path)["completion"]["token_ids"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_ctrl_c_while_starting_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-v", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    # `python -v` says on stderr what it imports, which shows when the long import of torch has
    # begun.
    while (
        "import 'torch'" not in (line := process.stderr.readline()) and "torch/__init__" not in line
    ):
        assert line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_closed_pipe_ends_the_run_without_a_complaint(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = start(*ENDLESS, "--json", path, "--quiet")
    read_some(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0
    assert read_json(path)["finish_reason"] == "interrupted"


def test_a_plan_that_nobody_reads_is_no_error(start: Start) -> None:
    process = start("--plan")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_runs_from_any_directory(start: Start, tmp_path: Path) -> None:
    process = start("--max-tokens", 2, "--ignore-eos", "--quiet", cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out


def test_user_errors_have_no_traceback(start: Start) -> None:
    process = start("--top-p", 7)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert (
        err.decode() == "error: --top-p: found '7', expected a number above 0 to 1 (see --help)\n"
    )


def test_terminal_encoding_without_the_characters_is_no_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = start("--max-tokens", 40, "--ignore-eos", "--quiet", "--seed", 1)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.isascii()


def test_prompt_from_stdin(checkpoint: Path) -> None:
    command = [
        sys.executable,
        DRIVER,
        "--model",
        checkpoint,
        "--prompt-file",
        "-",
        "--max-context",
        "8",
    ]
    process = subprocess.run(command, input="too long " * 100, capture_output=True, text=True)
    assert process.returncode == 2
    assert "--max-context: found a prompt of" in process.stderr
