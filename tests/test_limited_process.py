"""Commands with a time limit: what a signal leaves behind that comes while one is started."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dsv4.errors import UserError
from dsv4.limited_process import INTERRUPTED, TIMED_OUT, run_limited, signals_interrupt

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPT = signal.default_int_handler
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


@pytest.mark.usefixtures("interruptible")
def test_threads_which_no_signal_reaches_may_run_commands(tmp_path: Path) -> None:
    codes: list[int] = []

    def run() -> None:
        with (tmp_path / "log").open("w") as log:
            codes.append(run_limited(["true"], log, 60.0, 5.0).exit_code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]


def ran(script: str, log: Path, limit_seconds: float = 60.0, **named: Any) -> int:
    """The exit code of a script of the shell, whose output goes to ``log``."""
    with log.open("w") as file:
        return run_limited(["sh", "-c", script], file, limit_seconds, 20.0, **named).exit_code


def test_the_whole_group_may_end_in_order_before_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    waits = "echo begun; while :; do sleep 0.01; done"
    child = f"trap 'sleep 0.2; echo the child ends; exit' TERM; {waits}"
    leader = f"trap 'wait; echo the leader ends' TERM; ({child}) 2> /dev/null & wait"
    starting = count()
    code = ran(leader, log, 0.1, progress=lambda: log.read_text() or next(starting))
    assert code == TIMED_OUT
    assert log.read_text().splitlines() == ["begun", "the child ends", "the leader ends"]


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_kills_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children: list[Any] = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **named: children.append(Popen(*a, **named)) or children[0]
    )
    log = tmp_path / "log"
    # Does not end at SIGTERM, but interrupts whoever waits for that.
    script = "trap 'kill -INT $PPID' TERM; echo begun; while :; do sleep 0.01; done"
    starting = count()
    with pytest.raises(KeyboardInterrupt):
        ran(script, log, 0.1, progress=lambda: log.read_text() or next(starting))
    assert children[0].wait(20) == -signal.SIGKILL


def test_a_limit_is_that_of_no_progress_where_there_is_some(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ran("sleep 0.5", log, 0.1, progress=count().__next__) == 0
    assert ran("sleep 30", log, 0.1) == TIMED_OUT
    first = iter((1, 2))
    assert ran("sleep 30", log, 0.1, progress=lambda: next(first, 2)) == TIMED_OUT


def test_a_process_that_does_not_die_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wait(child: Any, seconds: float) -> int:
        raise subprocess.TimeoutExpired("sleep", seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert ran("sleep 30", tmp_path / "log", 0.1) == TIMED_OUT


def test_what_may_not_be_run_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.touch(0o600)
    with (tmp_path / "log").open("w") as log, pytest.raises(UserError) as caught:
        run_limited([str(script)], log, 60.0, 5.0)
    assert str(caught.value) == f"{script}: cannot be run (Permission denied)"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those that a test sets are as before behind it."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_closed_terminal_interrupts_unless_that_is_ignored() -> None:
    for before, expected in (
        (signal.SIG_IGN, signal.SIG_IGN),
        (signal.SIG_DFL, INTERRUPT),
        (print, INTERRUPT),
    ):
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with signals_interrupt():
            assert signal.getsignal(signal.SIGHUP) == expected
            assert signal.getsignal(signal.SIGTERM) == INTERRUPT
        assert signal.getsignal(signal.SIGHUP) == before
        with pytest.raises(OSError, match="full"), signals_interrupt():
            raise OSError("full")
        assert signal.getsignal(signal.SIGHUP) == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("handlers")
def test_signals_during_the_start_get_the_handlers_that_were_there(
    started: list[Any], tmp_path: Path
) -> None:
    """Handlers that return leave the command alone."""
    came: list[int] = []
    for number in NUMBERS:
        signal.signal(number, lambda number, _: came.append(number))
    assert ran("exit 3", tmp_path / "log") == 3
    assert len(started) == 1
    assert came == [signal.SIGINT, signal.SIGTERM]
