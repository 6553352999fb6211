"""``dsv4 serve`` as a process: its line, its end by a signal, and what it refuses at once."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from dsv4.demo import CHECKPOINT
from dsv4.serve.answering import Answering
from dsv4.serve.command import LIBRARIES, main
from dsv4.serve.sequences import FEWEST_TOKENS, SUFFIX
from dsv4.serve.server import Server
from tests.serve.running import connect, raw_request
from tests.source_rules import ROOT


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, IO[str]]]:
    """The process, the address that it tells, and what it says on stderr."""
    command = [sys.executable, "-m", "dsv4", "serve", "--device", "cpu", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(
                r"serving checkpoint at (http://127\.0\.0\.1:\d+/v1), context 8,192 tokens; "
                r"Ctrl-C ends it\n",
                line,
            )
            assert found is not None, line
            yield process, found[1], process.stderr
        finally:
            process.kill()


@pytest.mark.slow
def test_a_signal_ends_it_with_one_line_though_requests_are_under_way(tmp_path: Path) -> None:
    with started("--state-dir", str(tmp_path / "states")) as (process, url, err):
        done = httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 3})
        assert done.json()["usage"]["completion_tokens"] == 3
        with connect(url) as half, connect(url) as connection:
            half.sendall(raw_request(f"{url}/completions", b'{"prompt": "a"}')[:-4])
            body = b'{"prompt": "a", "max_tokens": 100000, "ignore_eos": true, "stream": true}'
            connection.sendall(raw_request(f"{url}/completions", body))
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        line = "answered 1 · not answered 1 · prompts 2 tokens (0 reused) · answers 3 tokens\n"
        assert err.read() == line


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 300])
def test_the_sequence_of_its_last_answer_is_kept(tmp_path: Path, signals: int) -> None:
    """However often it is asked to end within a second and a half. What a killed server has left
    behind is gone.
    """
    (tmp_path / ".dsv4-new-0123456789abcdef").touch()
    with started("--state-dir", str(tmp_path)) as (process, url, _):
        body = {"prompt": [5] * FEWEST_TOKENS, "max_tokens": 1}
        assert httpx.post(f"{url}/completions", json=body).status_code == 200
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        assert process.wait(30) == 128 + signal.SIGTERM
    [kept] = tmp_path.iterdir()
    assert kept.suffix == SUFFIX


@pytest.mark.slow
def test_a_signal_between_the_serving_and_the_writing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(server: Server, _: list[socket.socket]) -> None:
        server.handle_exit(signal.SIGTERM, None)
        signal.raise_signal(signal.SIGTERM)

    def unwanted(*_: object) -> None:
        raise AssertionError("the signal ended the command")

    kept: list[Answering] = []
    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(Answering, "keep_sequence", lambda one: kept.append(one))
    before = signal.signal(signal.SIGTERM, unwanted)
    try:
        code = main(["--device", "cpu", "--port", "0", "--quiet"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, len(kept)) == (128 + signal.SIGTERM, 1)
    assert capsys.readouterr().err.startswith("answered 0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port: found '70000', expected an integer from 0 to 65535"),
        (["--host", "0.0.0.0"], "--host: found 0.0.0.0, which others reach, expected --api-key"),
        (["--host", "no such host"], "--host: 'no such host': not found (Name or service not"),
        (["--host", ""], "--host: '': not found (Name or service not known)"),
        (["--api-key-file", "/nonexistent"], "--api-key-file: /nonexistent: cannot be read"),
        (["--api-key-file", "/dev/null"], "--api-key-file: /dev/null: found 0 words, expected one"),
        (["--api-key-file", "/dev/zero"], "--api-key-file: /dev/zero: found more than 1048576 b"),
        (["--model", "/nonexistent"], "--model: /nonexistent: no such folder"),
        (["--model-name", ""], "--model-name: found '', expected a name"),
        (["--state-dir", ""], "--state-dir: found '', expected a path"),
        (["--states", "3"], "--states: found without --state-dir, expected both"),
        (["--state-dir", "/dev/null/x"], "--state-dir: /dev/null/x: cannot be made (Not a dir"),
        (["--state-dir", __file__], f"--state-dir: {__file__}: found a file, expected a folder"),
        (["--parallel", "round-robin"], "--parallel: found with one device"),
        (["--verbose", "--quiet"], "--verbose: found together with --quiet, expected one"),
        (["--plan"], "unrecognized arguments: --plan"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsv4.cli.input_file.MAX_INPUT_BYTES", 2**20)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {message}")


def test_a_state_folder_that_nobody_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["--state-dir", str(tmp_path)]) == 2
    found = "found a folder that cannot be read and written, expected one that can"
    assert capsys.readouterr().err == f"error: --state-dir: {tmp_path}: {found}\n"


def test_a_state_folder_in_which_a_model_lies_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(CHECKPOINT)
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights.safetensors").touch()
    expected = "a model's, expected a folder for states alone"
    for folder, name in (
        (CHECKPOINT, "config.json"),
        (link, "config.json"),
        (other, "weights.safetensors"),
    ):
        # It is checked before the address, which is none.
        assert main(["--state-dir", str(folder), "--host", ""]) == 2
        said = f"error: --state-dir: {folder}: found {name}, {expected}\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ('{"temperature": -1}', "temperature: found -1, expected a finite number, 0 or more"),
        ('{"top_p": 2}', "top_p: found 2, expected "),
        ('{"min_p": 2}', "min_p: found 2, expected "),
        ('{"top_k": -1}', "top_k: found -1, expected an integer, 0 or more"),
        ('{"do_sample": "false"}', "do_sample: found 'false', expected true or false"),
        ('{"eos_token_id": true}', "eos_token_id: found True, expected token ids below"),
    ],
)
def test_a_wrong_generation_config_is_said_before_anything_is_loaded(
    generation: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(CHECKPOINT / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(generation)
    assert main(["--model", str(tmp_path), "--port", "0"]) == 2
    file = tmp_path / "generation_config.json"
    assert capsys.readouterr().err.startswith(f"error: {file}: {message}")


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--port", str(port), "--model", str(CHECKPOINT)]) == 2
    expected = f"error: --port: 127.0.0.1:{port}: cannot be used (Address already in use)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_its_libraries_one_line_names_the_extra(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert main([]) == 2
    advice = "expected the extra serve: pip install 'dsv4[serve]'"
    assert capsys.readouterr().err == f"error: dsv4 serve: found no {library}, {advice}\n"
