"""Standard streams as parents leave them."""

import io
import os
import subprocess
import sys
import time

import pytest

from dsv4.command.streams import prepare_streams, say
from tests.source_rules import ROOT

READS = """
import sys
from dsv4.command.streams import prepare_streams
prepare_streams()
sys.stderr.write("ready")
sys.stderr.flush()
sys.stdout.buffer.write(sys.stdin.buffer.read())
"""


def test_a_stdin_that_would_not_wait_is_waited_for() -> None:
    """Of a parent with an event loop: what comes late belongs to the prompt too."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    command = [sys.executable, "-c", READS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=reading, stdout=pipe, stderr=pipe) as process:
        os.close(reading)
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.read(5) == b"ready"
        os.write(writing, b"What is the capital of ")
        time.sleep(0.3)
        os.write(writing, b"France?")
        os.close(writing)
        assert process.stdout.read() == b"What is the capital of France?"


def test_what_the_encoding_of_stdout_lacks_is_a_question_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    prepare_streams()
    print("Grüße", flush=True)
    assert written.getvalue() == b"Gr??e\n"


def test_standard_streams_that_are_missing_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        print("nobody reads this", flush=True)
        say("nor this")
        assert sys.stdin.read() == ""


def test_a_line_that_nobody_reads_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    gone = Gone()
    monkeypatch.setattr(sys, "stderr", gone)
    say("a")
    assert gone.getvalue() == "a\n"
