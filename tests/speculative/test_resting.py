"""Rests of drafts on stand-ins for the devices: when they begin and end, and what they leave."""

from inspect import GEN_CLOSED, getgeneratorstate
from itertools import count, groupby
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.speculative.tally import DraftCount
from tests.speculative.world import START, WINDOW, World


def test_drafts_that_do_not_pay_rest_until_the_window_before_their_next_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=count().__next__)
    monkeypatch.setattr("dsv4.speculative.resting.time", clock)
    world = World(None, most=5, context=2000)
    world.wrong = [True] * 2010
    tokens = world.generate_with_rests(1500)
    assert list(tokens) == world.text[START + 1 : START + 1501]
    world.expect_at(START + 1500)
    stats = world.tally.stats()
    assert (stats.tokens, stats.verify_seconds) == (1500, stats.steps)
    lengths = [tokens for _, tokens in world.log]
    assert stats.drafted[0] <= sum(tokens > 1 for tokens in lengths)
    runs = [(tokens, len([*same])) for tokens, same in groupby(lengths)]
    # Both trials of a number, with a step in the queue that is known too late, then none, alone,
    # and the window again with its rows.
    rests = [count for tokens, count in runs if tokens == 0]
    assert rests[:3] == [pause - WINDOW for pause in (128, 256, 512)]
    behind = [runs[place + 1 : place + 3] for place, run in enumerate(runs) if run[0] == 0][:3]
    assert [[tokens for tokens, _ in run] for run in behind] == [[1, 6]] * 3
    assert all(run[0][1] == WINDOW for run in behind)


def test_a_run_may_end_soon_behind_a_rest() -> None:
    world = World(None, most=5, context=2000)
    world.wrong = [True] * 2010
    assert list(world.generate_with_rests(130)) == world.text[START + 1 : START + 131]
    world.expect_at(START + 130)
    assert [tokens for _, tokens in world.log[-5:]] == [0, 1, 1, 1, 1]


def test_a_run_may_end_anywhere_in_a_rest() -> None:
    lasts = []
    for steps in range(1, 40):
        world = World(None, most=5, context=2000)
        world.wrong = [True] * 2010
        assert list(world.generate_with_rests(steps)) == world.text[START + 1 : START + 1 + steps]
        world.expect_at(START + steps)
        lasts.append([tokens == 0 for _, tokens in world.log[-2:]])
    assert [False, True] in lasts


def test_leaving_ends_at_once_what_makes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the collector comes to it: somebody may still look at it."""
    followed: list[Any] = []
    world = World(5)
    generate = world.loop.generate

    def watched(*asked: Any) -> Any:
        followed.append(generate(*asked))
        return followed[-1]

    monkeypatch.setattr(world.loop, "generate", watched)
    tokens = world.generate_with_rests(40)
    next(tokens)
    tokens.close()
    assert [getgeneratorstate(one) for one in followed] == [GEN_CLOSED]
    world.expect_at(START + 1)


def test_drafts_follow_a_run_that_did_not_rest() -> None:
    world = World(5)
    list(world.generate_with_rests(40))
    assert world.state.draft is not None
    assert world.state.draft.covers(START + 40)


def test_a_caller_that_leaves_while_drafts_rest_leaves_the_tokens_it_took() -> None:
    world = World(None, most=5, context=2000)
    world.wrong = [True] * 2010
    tokens = world.generate_with_rests(1500)
    for _ in range(60):
        next(tokens)
    rested = sum(tokens == 0 for _, tokens in world.log)
    assert world.log[-1][1] == 0
    tokens.close()
    world.expect_at(START + 60)
    assert world.count.rest(WINDOW) == 128 - WINDOW - rested
    assert world.state.draft is not None
    assert not world.state.draft.covers(START + 60)


def test_nan_of_a_step_that_a_rest_leaves_unread_does_not_end_the_run() -> None:
    """Drafts pay for some time, and the step behind the last one that is read has some."""
    for place in range(START + 190, START + 200):
        world = World(5, context=2000)
        world.count = DraftCount((0, 5), by_times=False)
        world.wrong = [at > START + 120 for at in range(2010)]
        world.nan[place] = True
        assert list(world.generate_with_rests(250)) == world.text[START + 1 : START + 251]
        assert 0 in [tokens for _, tokens in world.log]
