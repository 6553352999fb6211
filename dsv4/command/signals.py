"""Ctrl-C, SIGTERM and SIGHUP end a command in order, however often they come."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

# For this long after the first signal further ones are taken for the same wish: half a second of
# Ctrl-C must not end the writing of what there is.
PATIENCE_SECONDS = 2.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The signal ``number`` asks the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_code(error: KeyboardInterrupt) -> int:
    """The exit code: 128 and the number of the signal."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


def end_at_once() -> None:
    """Until ``StopSignals``: importing torch takes seconds, and a signal during it ends as quietly
    as later.
    """
    _handle(lambda number, _: os._exit(128 + number))


class StopSignals:
    """Handlers of a process: the first signal raises ``Stopped``, one that comes when
    ``PATIENCE_SECONDS`` have passed ends the process at once.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def install(self) -> None:
        """Instead of what handled the signals before."""
        _handle(self._on_signal)

    def over(self) -> None:
        """From now on nothing is raised: the program is about to end by itself."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            raise Stopped(number)
        if now - self._stopped_at > PATIENCE_SECONDS:
            os._exit(128 + number)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """SIGHUP stays ignored where it is (nohup)."""
    for number in _NUMBERS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
