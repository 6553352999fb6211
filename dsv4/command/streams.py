"""Standard streams that may be closed, full or left by their reader."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO


def prepare_streams() -> None:
    """Closed standard streams lead to the null device, so that no file gets their numbers; those
    that would not wait, as a parent with an event loop leaves them, do; and stdout shows what its
    encoding lacks as ``?``.
    """
    for number in range(3):
        try:
            os.set_blocking(number, True)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest number that is free: this one.
    sys.stdin = sys.stdin or open_null("r")
    sys.stdout = sys.stdout or open_null("w")
    sys.stderr = sys.stderr or open_null("w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def open_null(mode: Literal["r", "w"]) -> TextIO:
    """The null device as a text file."""
    return Path(os.devnull).open(mode, encoding="utf-8")


def say(text: str) -> None:
    """A line on stderr. No run fails because nobody reads it."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def show(text: str = "") -> None:
    """Text on stdout, with what was written before it, at once. Raises ``OSError`` that names
    stdout, ``BrokenPipeError`` where its reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python makes it one of the class that goes with the number.
        raise OSError(error.errno, error.strerror, "stdout") from None


def silence_stdout() -> None:
    """Discards unwritten output, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
