"""The loop of steps with drafts on stand-ins for the devices: what is queued before what is read,
and what is taken back.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4 import SamplingParams
from dsv4.logprobs import TokenLogprobs
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler
from dsv4.speculative.tally import DraftCount
from tests.ops.channel.made import lost_words, wait_for_trapped
from tests.speculative.world import START, ChangingCount, World


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
@pytest.mark.parametrize("pattern", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_the_text_is_the_model_s_whatever_stays(drafts: int, pattern: int, steps: int) -> None:
    world = World(drafts, most=7)
    world.wrong = [place % pattern == 0 for place in range(400)]
    assert list(world.generate(steps)) == world.text[START + 1 : START + 1 + steps]
    stats = world.tally.stats()
    assert (stats.tokens, stats.drafted) == (steps, (stats.steps,) * drafts)
    world.expect_at(START + steps)
    # All steps are alike, and none is in vain.
    assert all(tokens == drafts + 1 for _, tokens in world.log)
    assert all(first < START + steps for first, _ in world.log)


@pytest.mark.parametrize("drafts", [1, 5, 7])
@pytest.mark.parametrize("pattern", [1, 3, 100])
def test_where_the_context_ends_steps_make_no_drafts(drafts: int, pattern: int) -> None:
    context = START + 23
    world = World(drafts, most=7, context=context)
    world.wrong = [place % pattern == 0 for place in range(400)]
    steps = context - START
    assert list(world.generate(steps)) == world.text[START + 1 : START + 1 + steps]
    world.expect_at(context)
    assert max(first + tokens for first, tokens in world.log) == context
    alone = [first for first, tokens in world.log if tokens == 1]
    assert all(first + drafts + 1 > context for first in alone if first < context - 1)


@pytest.mark.parametrize("taken", range(1, 14))
@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_what_is_queued_in_vain_is_taken_back(drafts: int, taken: int) -> None:
    world = World(drafts, most=7)
    world.wrong = [place % 4 == 0 for place in range(400)]
    tokens = world.generate(60)
    assert [next(tokens) for _ in range(taken)] == world.text[START + 1 : START + 1 + taken]
    tokens.close()
    world.expect_at(START + taken)
    assert world.state.undoable_tokens >= 0
    assert world.state.draft is not None
    assert world.state.draft.covers(world.state.position)


@pytest.mark.parametrize("drafts", [1, 5])
@pytest.mark.parametrize("piece", ["verify", "read"])
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_what_steps_have_overwritten_is_known_behind_an_interruption(
    drafts: int, piece: str, calls: int
) -> None:
    """In the wait for the older of two steps, or while one of them is queued."""
    world = World(drafts)
    run = getattr(world, piece)
    left = calls

    def interrupted(*numbers: int) -> Any:
        nonlocal left
        left -= 1
        if not left and piece == "read":
            raise KeyboardInterrupt
        found = run(*numbers)
        if not left:
            raise KeyboardInterrupt
        return found

    setattr(world, piece, interrupted)
    given = []
    with pytest.raises(KeyboardInterrupt):
        given.extend(world.generate(60))
    # Behind the token that the older step begins with, unless it is not queued as a whole.
    is_queued = piece == "read" or calls > 1
    world.expect_at(START + len(given) + is_queued)
    assert world.state.undoable_tokens >= 0


def test_a_run_counts_nothing_that_an_interrupted_one_has_queued() -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    world: Any = World(5)
    world.verify = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(world.generate(40))
    assert world.state.furthest == START + 6
    world.state.resume(START, START)
    assert list(world.generate(0)) == []
    assert world.state.furthest == START


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_pieces_of_a_step_are_queued_in_their_order(drafts: int) -> None:
    """The times of drafting and of verifying are between the marks."""
    world = World(drafts)
    next(world.generate(40))
    made = ["draft"] if drafts else []
    step = ["begin", *made, "drafted", "pass on", "verify", "settled", "rejected"]
    assert world.queued == step * 2
    assert world.ends == [START + drafts + 1, START + 2 * (drafts + 1)]


def test_steps_choose_by_the_settings_of_the_run() -> None:
    world = World(5)
    next(world.generate(40, Sampler(SamplingParams(seed=7))))
    assert int(world.sampler.seed_1) == 7


def test_steps_are_the_same_where_every_token_is_noted() -> None:
    """Its step is the last in the queue then: the logits are those that it was chosen by."""
    logs = []
    for logprobs in (None, 1):
        world = World(None, most=5)
        world.wrong = [place % 9 < 4 for place in range(2010)]
        sampler = Sampler(SamplingParams(temperature=0, logprobs=logprobs))
        assert list(world.generate(300, sampler)) == world.text[START + 1 : START + 301]
        assert all(entry.top[0][0] == entry.token_id for entry in sampler.noted)
        logs.append(world.log)
    assert logs[0] == logs[1]
    assert len({tokens for _, tokens in logs[0]}) > 2


@pytest.mark.parametrize("choices", [(0, 5), range(6)])
def test_steps_are_those_of_a_run_with_more_tokens(choices: Sequence[int]) -> None:
    """Also where the number of drafts changes near the end: a seed's text goes with it."""

    def steps_of(tokens: int) -> list[Any]:
        world = World(None)
        world.count = DraftCount(choices, by_times=False)
        world.wrong = [place % 9 < 4 for place in range(2010)]
        assert list(world.generate(tokens)) == world.text[START + 1 : START + 1 + tokens]
        return world.log

    longest = steps_of(120)
    assert len({tokens for _, tokens in longest}) > 1
    for tokens in range(1, 110):
        found = steps_of(tokens)
        assert found == longest[: len(found)]


def test_the_number_of_drafts_goes_by_the_whole_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of drafting, and that of verifying."""
    noted = []
    world = World(5)
    monkeypatch.setattr(world.count, "add", lambda *numbers: noted.append(numbers))
    list(world.generate(20))
    assert {seconds for _, _, seconds in noted} == {1.25}


def test_the_host_is_a_step_behind_where_caches_can_take_two_steps_back() -> None:
    for first, second, ahead in ((5, 5, 2), (5, 6, 1), (6, 6, 1), (0, 5, 2)):
        world = World(second, most=7)
        world.count = ChangingCount([first, second])
        tokens = world.generate(60)
        next(tokens)
        assert len(world.log) == ahead
        tokens.close()


def test_an_interruption_of_the_last_wait_leaves_the_tokens_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    world = World(5)
    tokens = world.generate(60)
    next(tokens)
    monkeypatch.setattr(world.state, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens.close()
    world.expect_at(START + 1)


def test_words_that_did_not_come_are_named() -> None:
    world: Any = World(5)
    world.state.channels = lost_words()
    world.read = wait_for_trapped
    with pytest.raises(RuntimeError, match="words of cuda:3 for cuda:1 did not come"):
        next(world.generate(40))


def test_nan_without_drafts_ends_the_run_behind_the_token_that_met_it() -> None:
    world = World(5)
    world.nan[START + 9] = True
    world.text[START + 7] = NAN_TOKEN
    tokens = world.generate(40)
    assert [next(tokens) for _ in range(6)] == world.text[START + 1 : START + 7]
    with pytest.raises(FloatingPointError, match=f"NaN after {START + 7} tokens"):
        next(tokens)
    assert world.state.position == START + 7


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_choice_that_cannot_be_noted_ends_the_run_behind_the_token_that_met_it(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """In the middle of a block as in a step alone: that position is named, and looked at again."""
    sampler = Sampler(SamplingParams(temperature=0, logprobs=0))
    add = sampler.add

    def refused(choice: TokenLogprobs) -> None:
        if len(sampler.noted) == 3:
            raise FloatingPointError
        add(choice)

    monkeypatch.setattr(sampler, "add", refused)
    world = World(drafts)
    tokens = world.generate(40, sampler)
    assert [next(tokens) for _ in range(3)] == world.text[START + 1 : START + 4]
    with pytest.raises(FloatingPointError):
        next(tokens)
    assert world.state.position == START + 4


def test_a_run_does_not_go_by_what_the_one_before_would_have_queued() -> None:
    world = World(5)
    noted = world.generate(60, Sampler(SamplingParams(temperature=0, logprobs=0)))
    next(noted)
    noted.close()
    world.state.rollback(START)
    world.log.clear()
    world.count = DraftCount((1,))
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert {tokens for _, tokens in world.log} == {2}


def test_a_sequence_that_the_module_does_not_know_yet_makes_no_drafts() -> None:
    world = World(5)
    assert world.state.draft is not None
    world.state.draft.forget()
    world.state.draft.begin(START - 4, 4)
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert [tokens for _, tokens in world.log[:13]] == [1] * 12 + [6]
