"""Commands with a time limit: what a signal leaves behind that comes while one is started."""

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from dsv4.errors import UserError
from dsv4.limited_process import INTERRUPTED, run_limited, signals_interrupt

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Popen = subprocess.Popen


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """Every child, behind whose start a test's signal comes, before anybody knows the child."""
    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **named: _kept(Popen(*a, **named), children)
    )
    return children


def _kept(child: Any, children: list[Any]) -> Any:
    children.append(child)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    return child


def test_a_signal_during_the_start_ends_the_child(started: list[Any], tmp_path: Path) -> None:
    try:
        with signals_interrupt(), (tmp_path / "log").open("w") as log:
            outcome = run_limited(["sleep", "60"], log, 60.0, 5.0)
        assert isinstance(outcome.interrupt, KeyboardInterrupt)
        assert outcome.exit_code == INTERRUPTED
        assert started[0].poll() == -signal.SIGTERM
    except KeyboardInterrupt:
        pytest.fail("the signal was raised, and the child left behind")
    finally:
        for child in started:
            child.kill()
            child.wait()


def test_handlers_are_as_before_whatever_the_command_did(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with (tmp_path / "log").open("w") as log:
        assert run_limited(["true"], log, 60.0, 5.0).exit_code == 0
        with pytest.raises(UserError, match="cannot be run"):
            run_limited([str(tmp_path / "none")], log, 60.0, 5.0)
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_threads_which_no_signal_reaches_may_run_commands(tmp_path: Path) -> None:
    codes: list[int] = []

    def run() -> None:
        with (tmp_path / "log").open("w") as log:
            codes.append(run_limited(["true"], log, 60.0, 5.0).exit_code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]
