"""Standard streams as parents leave them."""

import os
import subprocess
import sys
import time

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
