"""A progress bar on a terminal, in one line that disappears when it is done."""

import time
from typing import Self, TextIO

BAR_CELLS = 32
REDRAW_SECONDS = 0.1
ERASE_LINE = "\r\x1b[K"


class ProgressBar:
    """``bar(done, total)`` draws ``label ━━━── 42 %``; leaving the ``with`` block erases the line.

    Draws only where ``enabled``; at most every ``REDRAW_SECONDS``. ``done`` and ``total`` share any unit.
    """

    def __init__(self, label: str, stream: TextIO, enabled: bool) -> None:
        self.label = label
        self.stream = stream
        self.enabled = enabled
        self.drawn_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.enabled or total <= 0 or now - self.drawn_at < REDRAW_SECONDS:
            return
        self.drawn_at = now
        filled = BAR_CELLS * done // total
        bar = "━" * filled + "─" * (BAR_CELLS - filled)
        self.stream.write(f"{ERASE_LINE}{self.label} {bar} {100 * done // total:3d} %")
        self.stream.flush()

    def erase(self) -> None:
        """Removes the line, if one was drawn."""
        if self.drawn_at != float("-inf"):
            self.stream.write(ERASE_LINE)
            self.stream.flush()
            self.drawn_at = float("-inf")
