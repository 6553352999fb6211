"""Ctrl-C that ends an answer and not the chat."""

import signal
from types import FrameType
from typing import Self

from dsv4.command.signals import Stopped


class AnswerStopped(Exception):
    """Ctrl-C came during an answer."""


class StopRequest:
    """Inside the block the first Ctrl-C is noted, and ``check`` raises ``AnswerStopped`` between
    two chunks or tokens, so that what was shown and what is kept are the same. A second one, for a
    step that does not end, raises ``Stopped`` at once.
    """

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises ``AnswerStopped`` if Ctrl-C has come."""
        if self._asked:
            raise AnswerStopped

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            raise Stopped(number)
        self._asked = True
