"""Signals while a program still imports: its exit code says which one, and nothing is printed."""

import signal
import subprocess
import sys

import pytest

from tests.source_rules import ROOT

# Where a program has begun and torch is not imported yet, {signal} comes.
STARTS = {
    "dsv4": """
import dsv4.__main__
dsv4.__main__.main = lambda _: signal.raise_signal({signal})
dsv4.__main__.program()
""",
    "single_shot_inference.py": """
import importlib.util, runpy
importlib.util.find_spec = lambda _: signal.raise_signal({signal})
runpy.run_path("single_shot_inference.py", run_name="__main__")
""",
}


def run(name: str, number: signal.Signals, hangup: str = "SIG_DFL") -> tuple[int, str]:
    """The exit code and the output; ``hangup``: how SIGHUP is handled before."""
    before = f"import signal\nsignal.signal(signal.SIGHUP, signal.{hangup})\n"
    script = STARTS[name].format(signal=int(number))
    command = [sys.executable, "-c", before + script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_program_that_starts(name: str, number: signal.Signals) -> None:
    assert run(name, number) == (128 + number, "")


def test_a_program_under_nohup_starts_nevertheless() -> None:
    assert run("dsv4", signal.SIGHUP, "SIG_IGN") == (0, "")
