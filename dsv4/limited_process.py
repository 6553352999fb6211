"""Runs a command with a time limit and leaves none of its processes behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from dsv4.errors import UserError

TIMED_OUT = 124
INTERRUPTED = 130
# A process that the kernel cannot end, because its device does not answer, is left behind after
# this: waiting for it would hang the caller too.
_DEATH_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``interrupt``: what ended it, if the caller was interrupted meanwhile."""

    exit_code: int
    seconds: float
    interrupt: KeyboardInterrupt | None = None


def python_command(code: str) -> list[str]:
    """``code`` in another Python that finds the modules that this one finds."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def run_limited(
    command: list[str],
    log: IO[str],
    limit_seconds: float,
    grace_seconds: float,
    stdin: int = subprocess.DEVNULL,
    progress: Callable[[], object] | None = None,
) -> Outcome:
    """Runs ``command`` in a process group of its own, output to ``log``. ``stdin`` is that of
    ``subprocess.Popen``. With ``progress`` the limit is that of the time in which its value stays
    the same.

    At the limit, or on ``KeyboardInterrupt``, the group gets SIGTERM and, when its leader has ended
    or after the grace period, SIGKILL. Processes that a command leaves behind are killed too.
    Raises ``UserError`` when it cannot be started.
    """
    started = time.monotonic()
    ended = False
    interrupt = None
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(_signals_wait())
        try:
            child = subprocess.Popen(
                command, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be run ({error.strerror})") from None
        try:
            waiting.close()
            ended = _ends_within(child, limit_seconds, progress)
        except KeyboardInterrupt as stop:
            interrupt = stop
        finally:
            _end_group(child, grace_seconds)
    if child.stdin is not None:
        child.stdin.close()
    code = TIMED_OUT if interrupt is None else INTERRUPTED
    with contextlib.suppress(subprocess.TimeoutExpired):
        returned = child.wait(_DEATH_SECONDS)
        if ended:
            code = returned if returned >= 0 else 128 - returned
    return Outcome(code, time.monotonic() - started, interrupt)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """A cancelled job (SIGTERM) and a closed terminal (SIGHUP, unless ignored) end the child as
    Ctrl-C does.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that would interrupt do so at the end: one that comes while a child is made would
    leave it behind, because nobody knows it yet. Only the main thread is interrupted.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {
        number: handler
        for number in numbers
        if is_main and callable(handler := signal.getsignal(number))
    }
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            before[number](number, None)


def _ends_within(
    child: subprocess.Popen, seconds: float, progress: Callable[[], object] | None = None
) -> bool:
    """Whether ``child`` ends. It is left a zombie, so that its group's number cannot pass to
    another process.
    """
    deadline = time.monotonic() + seconds
    reached = None
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        now_reached = None if progress is None else progress()
        if now_reached != reached:
            reached = now_reached
            deadline = time.monotonic() + seconds
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _end_group(child: subprocess.Popen, grace_seconds: float) -> None:
    try:
        if not _ends_within(child, 0):
            os.killpg(child.pid, signal.SIGTERM)
            _ends_within(child, grace_seconds)
    finally:
        # Some systems refuse to signal a group with nothing but the zombie left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
