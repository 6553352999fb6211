"""The progress bar: where it draws, how often, and that it leaves nothing behind."""

import io

import pytest

from dsv4.cli.progress import BAR_CELLS, ERASE_LINE, ProgressBar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("dsv4.cli.progress.time.monotonic", lambda: now[0])
    return now


def test_draws_the_share_that_is_done(clock: list[float]) -> None:
    out = io.StringIO()
    ProgressBar("load", out, enabled=True)(1, 4)
    assert out.getvalue() == f"{ERASE_LINE}load {'━' * (BAR_CELLS // 4)}{'─' * (BAR_CELLS * 3 // 4)}  25 %"


def test_draws_at_most_ten_times_a_second(clock: list[float]) -> None:
    out = io.StringIO()
    bar = ProgressBar("load", out, enabled=True)
    for clock[0] in (0.0, 0.05, 0.15):
        bar(1, 2)
    assert out.getvalue().count("load") == 2


def test_line_is_erased_at_the_end_also_after_an_error() -> None:
    out = io.StringIO()
    bar = ProgressBar("load", out, enabled=True)

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
    with ProgressBar("load", out, enabled) as bar:
        bar(0, total)
    assert out.getvalue() == ""
