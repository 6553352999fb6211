"""The progress bar: where it draws, how often, and that it leaves nothing behind."""

import io
import os
from pathlib import Path

import pytest

from dsv4.command.progress import (
    BAR_CELLS,
    ERASE_LINE,
    GIGABYTES,
    TOKENS,
    ProgressBar,
    StatusLine,
    Unit,
    duration,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("dsv4.command.progress.time.monotonic", lambda: now[0])
    return now


def test_draws_the_share_that_is_done(clock: list[float]) -> None:
    out = io.StringIO()
    ProgressBar("load", GIGABYTES, out, True)(10**9, 4 * 10**9)
    bar = "━" * (BAR_CELLS // 4) + "─" * (BAR_CELLS * 3 // 4)
    assert out.getvalue() == f"{ERASE_LINE}load {bar}  25 %  1.0 of 4.0 GB"


def test_rate_is_that_since_the_first_call(clock: list[float]) -> None:
    """What comes before the first report (opening files, compiling kernels) is not part of it."""
    lines = []
    for unit, scale in ((GIGABYTES, 10**9), (TOKENS, 1000)):
        out = io.StringIO()
        bar = ProgressBar("x", unit, out, True)
        for clock[0], done in ((10.0, 1), (12.0, 8)):
            bar(done * scale, 10 * scale)
        lines.append(out.getvalue().rpartition("%")[2])
    assert lines == [
        "  8.0 of 10.0 GB  3.5 GB/s  0:01 left",
        "  8,000 of 10,000 tok  3,500 tok/s  0:01 left",
    ]


@pytest.mark.parametrize(("unit", "most"), [(GIGABYTES, 900 * 10**9), (TOKENS, 1 << 20)])
@pytest.mark.parametrize("columns", [10, 20, 30, 45, 62, 80, 200])
def test_line_fits_any_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, unit: Unit, most: int, columns: int
) -> None:
    """A line that reaches the last column wraps, and could not be erased."""
    monkeypatch.setattr(StatusLine, "columns", columns - 1)
    out = io.StringIO()
    bar = ProgressBar("prefill", unit, out, True)
    for clock[0], done in ((0.0, 0), (4000.0, most // 2), (9000.0, most)):
        bar(done, most)
    lines = out.getvalue().split(ERASE_LINE)[1:]
    assert len(lines) == 3
    assert max(map(len, lines)) < columns
    assert ["50 %" in lines[1], "100 %" in lines[2]] == [columns >= 20] * 2
    assert ("1:06:40 left" in lines[1]) == (columns >= 30)
    assert ("━" in lines[1]) == (columns >= 45)


@pytest.mark.parametrize(
    ("size", "columns"), [(os.terminal_size((30, 20)), 29), (os.terminal_size((0, 0)), 79)]
)
def test_columns_are_those_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: os.terminal_size, columns: int
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: size)
    with (tmp_path / "terminal").open("w") as terminal:
        assert StatusLine(terminal, True).columns == columns
    assert StatusLine(io.StringIO(), True).columns == 79


def test_the_end_is_always_drawn(clock: list[float]) -> None:
    out = io.StringIO()
    bar = ProgressBar("read", GIGABYTES, out, True)
    for clock[0], done in ((0.0, 0), (0.01, 5), (0.02, 10)):
        bar(done, 10)
    lines = out.getvalue().split(ERASE_LINE)[1:]
    assert ["  0 %" in lines[0], "100 %" in lines[-1], len(lines)] == [True, True, 2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0:01"), (59, "0:59"), (60, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_draws_at_most_ten_times_a_second(clock: list[float]) -> None:
    out = io.StringIO()
    bar = ProgressBar("load", GIGABYTES, out, True)
    for clock[0] in (0.0, 0.05, 0.15):
        bar(1, 2)
    assert out.getvalue().count("load") == 2


def test_line_is_erased_at_the_end_also_after_an_error() -> None:
    out = io.StringIO()
    bar = ProgressBar("load", GIGABYTES, out, True)

    def fail() -> None:
        with bar:
            bar(1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert out.getvalue().endswith(ERASE_LINE)


@pytest.mark.parametrize(("enabled", "total"), [(False, 4), (True, 0)])
def test_writes_nothing_without_a_terminal_or_work(enabled: bool, total: int) -> None:
    out = io.StringIO()
    with ProgressBar("load", GIGABYTES, out, enabled) as bar:
        bar(0, total)
        bar(total, total)
    assert out.getvalue() == ""
