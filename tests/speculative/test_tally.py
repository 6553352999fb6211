"""How many drafts pay: chosen by measured times and by what was kept."""

import logging
import re
from itertools import groupby, pairwise
from typing import Any

import pytest

from dsv4 import EngineConfig
from dsv4.errors import UserError
from dsv4.run_stats import DraftStats
from dsv4.speculative.tally import (
    CHOICE_STEPS,
    JUDGED_DRAFTS,
    MEASURED_STEPS,
    TRIAL_STEPS,
    TRIED_AGAIN,
    DraftCount,
    Tally,
    Usefulness,
    drafts_of_a_step,
)


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
    [(0.9, 0.05, 5), (0.5, 0.3, 5), (0.9, 1.5, 0), (0.0, 0.05, 0), (0.3, 1.0, 0), (0.0, -0.1, 0)],
)
def test_the_number_with_most_tokens_a_second_is_taken(
    kept: float, seconds_of_draft: float, expected: int
) -> None:
    for choices in (range(6), (0, 5)):
        chosen = run(DraftCount(choices), 200, kept, seconds_of_draft)
        assert chosen[:TRIAL_STEPS] == [5] * TRIAL_STEPS
        assert chosen[-1] == expected


@pytest.mark.parametrize(
    ("seconds", "kept"), [({0: 1.0, 1: 1.0, 5: 9.0}, 5), ({0: 0.9, 1: 3.0, 5: 3.0}, 2)]
)
def test_numbers_between_those_that_are_measured_are_taken_to_lie_on_a_line(
    seconds: dict[int, float], kept: int
) -> None:
    """Near one that was slow none promises more than the best that was measured."""
    count = DraftCount(range(6))
    for _ in range(200):
        assert count.now in seconds
        count.add(count.now, min(count.now, kept), seconds[count.now])


def test_nothing_rests_where_drafts_pay() -> None:
    count = DraftCount((0, 5))
    run(count, 100, 0.9, 0.05)
    assert count.rest(0) == 0


def test_one_slow_step_changes_nothing() -> None:
    count = DraftCount((0, 5))
    for step in range(2 * TRIAL_STEPS):
        slow = 100.0 if step == TRIAL_STEPS // 2 else 0.0
        count.add(count.now, count.now, 1 + 0.05 * count.now + slow)
    assert count.now == 5


def test_what_does_not_pay_is_tried_for_a_few_steps_and_ever_less_often() -> None:
    chosen = run(DraftCount((0, 5)), 8000, 0.0, 0.3)
    begins = [step for step in range(1, 8000) if chosen[step] > chosen[step - 1]]
    pauses = [second - first for first, second in pairwise([0, *begins])]
    tried = 2 * TRIAL_STEPS
    assert pauses == [tried + pause for pause in (128, 256, 512, 1024, 2048, 2048)]
    assert chosen.count(5) == (1 + len(begins)) * TRIAL_STEPS


def test_where_a_seed_has_to_repeat_a_text_neither_times_nor_earlier_runs_count() -> None:
    measured = DraftCount(range(6))
    assert measured.for_run(is_greedy=True) is measured
    chosen = []
    for seconds in (0.01, 100.0):
        run(measured, 100, 0.0, seconds)
        chosen.append(run(measured.for_run(is_greedy=False), 700, 0.5, seconds))
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
    assert run(measured.for_run(is_greedy=False), 100, 0.0, 0.01)[-1] == 0
    assert run(DraftCount((0, 1), by_times=False), 100, 0.3, 0.0)[-1] == 0
    fixed = DraftCount((5,))
    assert fixed.for_run(is_greedy=False) is fixed


def test_some_of_the_drafts_are_taken_where_later_ones_are_never_kept() -> None:
    count = DraftCount(range(6))
    chosen = []
    for _ in range(200):
        chosen.append(count.now)
        count.add(count.now, min(count.now, 2), 1 + 0.3 * count.now)
    assert set(chosen[3 * TRIAL_STEPS :]) == {2}


def test_times_between_those_that_are_measured_lie_on_a_line() -> None:
    """A second draft, kept half of the time, does not pay for its seconds."""
    count = DraftCount(range(6))
    for step in range(200):
        count.add(count.now, min(count.now, 1 + step % 2), 1 + 0.8 * count.now)
    assert count.now == 1


def test_the_second_of_five_is_nearer_to_the_first_than_to_the_last() -> None:
    """Two are always kept: 3 tokens in 2.8 seconds are more than 2 in 2 or 1 in 1."""
    count = DraftCount(range(6))
    for _ in range(3 * TRIAL_STEPS):
        count.add(count.now, min(count.now, 2), {0: 1.0, 1: 2.0, 5: 5.2}[count.now])
    assert count.now == 2


def test_it_is_said_when_drafts_begin_and_cease_to_pay(caplog: pytest.LogCaptureFixture) -> None:
    """With the share that this went by, in which old drafts count half."""
    count = DraftCount((0, 5))
    with caplog.at_level(logging.INFO, "dsv4"):
        run(count, 2 * CHOICE_STEPS, 1.0, 0.3)
        assert caplog.messages == []
        # Of 60 first drafts 30 count, and half of the 62 with those that follow.
        run(count, 2 * CHOICE_STEPS, 0.0, 0.3)
        assert caplog.messages == ["drafts: none a step, 15 of 63 first drafts accepted"]
        run(count, MEASURED_STEPS, 1.0, 0.01)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("drafts: 5 a step, ")


def test_what_the_first_draft_takes_is_measured() -> None:
    """Most of a block's time is there with one draft already."""
    count = DraftCount(range(6))
    chosen = []
    for _ in range(100):
        chosen.append(count.now)
        count.add(count.now, min(count.now, 1), 2.2 + 0.02 * count.now if count.now else 1)
    assert chosen.count(1) == TRIAL_STEPS
    assert chosen[-1] == 0


def test_shares_follow_the_text() -> None:
    count = DraftCount((0, 5))
    assert run(count, 300, 1.0, 0.1)[-1] == 5
    chosen = run(count, 4 * CHOICE_STEPS, 0.0, 0.1)
    assert chosen[-1] == 0
    # The number of a text changes seldom.
    assert (300 + chosen.index(0)) % CHOICE_STEPS == 0


@pytest.mark.parametrize(
    ("draft", "draft_tokens", "possible"),
    [
        ("auto", None, (5,)),
        ("dspark", None, (5,)),
        ("auto", 3, (3,)),
        ("dspark", "auto", (1, 2, 3, 4, 5)),
    ],
)
def test_what_is_asked_says_what_is_possible(
    draft: Any, draft_tokens: Any, possible: tuple[int, ...]
) -> None:
    asked = drafts_of_a_step(EngineConfig(draft=draft, draft_tokens=draft_tokens))
    count = DraftCount.asked(asked, 5, 5)
    assert count.possible == possible
    chosen = run(count, 40, 0.0, 1.0)
    gives_up = draft_tokens == "auto" or (draft == "auto" and draft_tokens is None)
    assert (chosen[-1] == 0) == gives_up


def test_what_did_not_pay_is_tried_again() -> None:
    count = DraftCount((0, 5))
    chosen = run(count, 100, 0.0, 0.5)
    assert chosen[-1] == 0
    later = run(count, MEASURED_STEPS + 200, 0.95, 0.01)
    assert later[-1] == 5


def test_what_pays_is_measured_seldom_and_what_has_paid_is_soon_tried_again() -> None:
    count = DraftCount((0, 5))
    chosen = run(count, 3 * MEASURED_STEPS, 0.95, 0.01)
    assert chosen.count(0) == 3 * TRIAL_STEPS
    run(count, 5000, 0.0, 0.3)
    run(count, 5000, 0.95, 0.01)
    chosen = run(count, 1000, 0.0, 0.3)
    rests = [len(list(steps)) for drafted, steps in groupby(chosen) if drafted == 0]
    # The first one begins between two trials.
    assert rests[1] == TRIAL_STEPS + TRIED_AGAIN[0]


def test_rests_begin_when_all_is_measured_and_end_before_drafts_are_tried_again() -> None:
    count = DraftCount((0, 5))
    run(count, TRIAL_STEPS, 0.0, 0.5)
    assert (count.now, count.rest(0)) == (0, 0)
    run(count, TRIAL_STEPS, 0.0, 0.5)
    assert [count.rest(window) for window in (0, 8, 1000)] == [TRIED_AGAIN[0], 120, 0]
    count.skip()
    assert count.rest(0) == TRIED_AGAIN[0] - 1
    assert DraftCount((5,)).rest(0) == 0


def test_a_fixed_number_stays() -> None:
    assert set(run(DraftCount((3,)), 100, 0.0, 1.0)) == {3}
    assert DraftCount.asked(5, 5, 3).possible == (5,)
    assert DraftCount.asked(None, 2, 3).possible == (2,)
    assert DraftCount.asked(None, 5, 3).possible == (3,)
    assert DraftCount.asked("if_faster", 5, 3).possible == (3,)
    with pytest.raises(UserError, match="draft_tokens: found 6, expected 1 to 5"):
        DraftCount.asked(6, 5, 3)


@pytest.mark.parametrize(("drafted", "accepted", "warned"), [(32, 6, 1), (31, 0, 0), (40, 8, 0)])
def test_drafts_that_are_hardly_ever_kept_are_said_once(
    drafted: int, accepted: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all runs together; those without drafts say nothing."""
    useful = Usefulness()
    with caplog.at_level(logging.WARNING, "dsv4"):
        for made, kept in ((0, 0), (1, 0), (drafted - 1, accepted)):
            tried = ((made,), (kept,)) if made else ((), ())
            useful.judge(DraftStats(made, made, *tried, 0.0, 0.0))
        assert len(caplog.records) == warned
        useful.judge(DraftStats(1, 1, (JUDGED_DRAFTS,), (0,), 0.0, 0.0))
    (message,) = caplog.messages
    assert re.match(
        r"drafts: \d+ of \d+ first drafts were accepted, expected 20 % or more", message
    )


def test_counts_are_kept_by_position() -> None:
    tally = Tally(5)
    tally.add(4, 2, 3, (0.1, 0.2))
    tally.add(3, 0, 1, (0.1, 0.2))
    tally.add(1, 1, 2, (0.1, 0.2))
    tally.add(0, 0, 1, (0.0, 0.2))
    stats = tally.stats()
    assert (stats.steps, stats.tokens, stats.tokens_per_step) == (4, 7, 7 / 4)
    assert stats.drafted == (3, 2, 2, 1)
    assert stats.accepted == (2, 1, 0, 0)
    assert stats.acceptance == (2 / 3, 1 / 2, 0.0, 0.0)
    assert stats.draft_seconds == pytest.approx(0.3)
    assert stats.verify_seconds == pytest.approx(0.8)


def test_a_rate_needs_one_step() -> None:
    tally = Tally(5)
    none = tally.stats()
    assert (none.steps, none.tokens_per_step, none.acceptance) == (0, None, ())
    tally.add(3, 1, 2, (0.1, 0.2))
    assert tally.stats().tokens_per_step == 2
