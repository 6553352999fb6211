"""A progress bar on a terminal, in one line that disappears when it is done."""

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


class ProgressBar:
    """``bar(done, total)`` draws ``label ━━── 43 % 12.3 of 28.6 GB 3.1 GB/s``; leaving the ``with``
    block erases it.

    Draws only where ``enabled``; at most every ``REDRAW_SECONDS``. The rate is that since the first
    call.
    """

    def __init__(self, label: str, unit: Unit, stream: TextIO, enabled: bool) -> None:
        self.label = label
        self.unit = unit
        self.stream = stream
        self.enabled = enabled
        self.drawn_at = float("-inf")
        self.first: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        if not self.enabled or total <= 0 or now - self.drawn_at < REDRAW_SECONDS:
            return
        self.drawn_at = now
        filled = BAR_CELLS * done // total
        parts = [
            f"{self.label} {'━' * filled}{'─' * (BAR_CELLS - filled)} {100 * done // total:3d} %",
            f"{self.unit.write(done)} of {self.unit.write(total)} {self.unit.name}",
        ]
        started, before = self.first
        if now > started:
            parts.append(f"{self.unit.write((done - before) / (now - started))} {self.unit.name}/s")
        self.stream.write(ERASE_LINE + "  ".join(parts))
        self.stream.flush()

    def erase(self) -> None:
        """Removes the line, if one was drawn."""
        if self.drawn_at != float("-inf"):
            self.stream.write(ERASE_LINE)
            self.stream.flush()
            self.drawn_at = float("-inf")
