"""How many drafts pay: chosen by measured times and by what was kept."""

import pytest

from dsv4.speculative.tally import MEASURED_STEPS, DraftCount, Tally


def run(count: DraftCount, steps: int, kept: float, seconds_of_draft: float) -> list[int]:
    """The numbers of drafts of ``steps`` steps, of which the first ``kept`` share is accepted in
    full, and which take one second and ``seconds_of_draft`` for every draft.
    """
    chosen = []
    for step in range(steps):
        drafted = count.now
        accepted = drafted if (step * 7 % 10) < 10 * kept else 0
        count.add(drafted, accepted, 1 + seconds_of_draft * drafted)
        chosen.append(drafted)
    return chosen


@pytest.mark.parametrize(
    ("kept", "seconds_of_draft", "expected"),
    [(0.9, 0.05, 5), (0.9, 1.5, 0), (0.0, 0.05, 0), (0.3, 1.0, 0)],
)
def test_the_number_with_most_tokens_a_second_is_taken(
    kept: float, seconds_of_draft: float, expected: int
) -> None:
    count = DraftCount(None, 5)
    chosen = run(count, 200, kept, seconds_of_draft)
    assert chosen[:8] == [5] * 8
    assert chosen[-1] == expected


def test_what_did_not_pay_is_tried_again() -> None:
    count = DraftCount(None, 5)
    chosen = run(count, 100, 0.0, 0.5)
    assert chosen[-1] == 0
    later = run(count, MEASURED_STEPS + 200, 0.95, 0.01)
    assert later[-1] == 5


def test_a_fixed_number_stays() -> None:
    assert set(run(DraftCount(3, 5), 100, 0.0, 1.0)) == {3}


def test_counts_are_kept_by_position() -> None:
    tally = Tally(5)
    tally.add(3, 2, 3, (0.1, 0.2))
    tally.add(3, 0, 1, (0.1, 0.2))
    tally.add(1, 1, 2, (0.1, 0.2))
    tally.add(0, 0, 1, (0.0, 0.2))
    stats = tally.stats()
    assert (stats.steps, stats.tokens, stats.tokens_per_step) == (4, 7, 7 / 4)
    assert stats.drafted == (3, 2, 2)
    assert stats.accepted == (2, 1, 0)
    assert stats.acceptance == (2 / 3, 1 / 2, 0.0)
    assert stats.draft_seconds == pytest.approx(0.3)
    assert stats.verify_seconds == pytest.approx(0.8)
