"""A progress bar on a terminal, in one line that disappears when it is done."""

import math
import os
import time
from dataclasses import dataclass
from typing import Self, TextIO

BAR_CELLS = 20
REDRAW_SECONDS = 0.1
ERASE_LINE = "\r\x1b[K"


@dataclass(frozen=True)
class Unit:
    """The unit of a bar: ``size`` reported items are one unit, shown with ``digits`` decimals."""

    name: str
    size: float
    digits: int

    def write(self, amount: float) -> str:
        """The number without the name."""
        return f"{amount / self.size:,.{self.digits}f}"


GIGABYTES = Unit("GB", 1e9, 1)
TOKENS = Unit("tok", 1, 0)
KERNELS = Unit("kernels", 1, 0)


class StatusLine:
    """One line of a terminal that says what is going on, and disappears.

    Draws only where ``enabled``, at most every ``REDRAW_SECONDS``, and never more than fits: a line
    that wraps cannot be erased.
    """

    def __init__(self, stream: TextIO, enabled: bool) -> None:
        self.stream = stream
        self.enabled = enabled
        self.drawn_at = float("-inf")

    @property
    def columns(self) -> int:
        """Columns that can be written; a terminal that does not say has 80."""
        try:
            width = os.get_terminal_size(self.stream.fileno()).columns
        except OSError:
            width = 0
        return (width or 80) - 1

    def is_due(self) -> bool:
        """Whether it is time to draw again."""
        return self.enabled and time.monotonic() - self.drawn_at >= REDRAW_SECONDS

    def show(self, text: str, now: bool = False) -> None:
        """Draws ``text`` if it is due, or ``now``."""
        if self.is_due() or (self.enabled and now):
            self.drawn_at = time.monotonic()
            self.stream.write(ERASE_LINE + text[: self.columns])
            self.stream.flush()

    def erase(self) -> None:
        """Removes the line, if one was drawn."""
        if self.drawn_at != float("-inf"):
            self.stream.write(ERASE_LINE)
            self.stream.flush()
            self.drawn_at = float("-inf")


class ProgressBar:
    """``bar(done, total)`` draws ``label ━━── 43 %  12.3 of 28.6 GB  3.1 GB/s  0:06 left``, of it
    what fits; leaving the ``with`` block erases it.

    Rate and time left are those since the first call. The end is always drawn.
    """

    def __init__(self, label: str, unit: Unit, stream: TextIO, enabled: bool) -> None:
        self.label = label
        self.unit = unit
        self.line = StatusLine(stream, enabled)
        self.first: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        if total > 0 and (self.line.is_due() or done >= total):
            self.line.show(self.text(now, done, total), now=True)

    def erase(self) -> None:
        """Removes the line, if one was drawn."""
        self.line.erase()

    def text(self, now: float, done: int, total: int) -> str:
        """As much as fits: without the rate, the amounts, a long bar, any bar, in this order."""
        write = self.unit.write
        percent = f"{100 * done // total:3d} %"
        amounts = f"{write(done)} of {write(total)} {self.unit.name}"
        rate = ""
        left = ""
        started, before = self.first or (now, done)
        if now > started and done > before:
            speed = (done - before) / (now - started)
            rate = f"{write(speed)} {self.unit.name}/s"
            left = f"{duration((total - done) / speed)} left" if done < total else ""
        texts = [
            "  ".join(filter(None, (f"{self.label} {bar(cells, done, total)}{percent}", *details)))
            for cells, details in (
                (BAR_CELLS, (amounts, rate, left)),
                (BAR_CELLS, (amounts, left)),
                (BAR_CELLS, (left,)),
                (BAR_CELLS // 4, (left,)),
                (0, (left,)),
            )
        ]
        return next((text for text in texts if len(text) <= self.line.columns), texts[-1])


def bar(cells: int, done: int, total: int) -> str:
    """``cells`` characters, as many of them filled as are done, and a space."""
    filled = min(cells * done // total, cells)
    return f"{'━' * filled}{'─' * (cells - filled)} " if cells else ""


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
