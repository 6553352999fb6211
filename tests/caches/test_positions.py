"""Positions of a decode state alone: how far it goes back, and where an interruption leaves it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4 import EngineConfig, ModelConfig
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import tiny_config
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state

CONFIG = ModelConfig.from_dict(tiny_config())
ENGINE = EngineConfig(device="cpu", max_context=256)


def state_behind(position: int, ranks: int = 1) -> DecodeState:
    devices = [torch.device("cpu")] * ranks
    placement = Placement.tensor(CONFIG.num_hidden_layers, devices)
    state = allocate_state(CONFIG, ENGINE, 256, placement)
    state.advance(position)
    state.set_position(position)
    return state


def test_tokens_are_taken_back_as_far_as_the_rings_remember() -> None:
    state = state_behind(40)
    lowest = 40 - MAX_DECODE_TOKENS
    with pytest.raises(ValueError, match=f"found {lowest - 1}, expected {lowest} to"):
        state.rollback(lowest - 1)
    state.rollback(lowest)
    assert state.position == lowest


@pytest.mark.parametrize(("tokens", "has_point", "left"), [(1, 0, 40), (60, 0, 0), (60, 1, 40)])
def test_an_interrupted_step_ends_where_it_began_or_at_what_can_be_reached(
    tokens: int, has_point: int, left: int
) -> None:
    state = state_behind(40)
    if has_point:
        state.keep_point()
    with pytest.raises(KeyboardInterrupt):
        append_and_be_interrupted(state, tokens)
    assert state.position == left
    assert [int(position_1) for position_1 in state.positions_1.values()] == [left]


def test_what_any_rank_has_met_is_known_to_all() -> None:
    state = state_behind(40, ranks=2)
    state.others[0].nan_1.fill_(1)
    assert state.met_nan
    state.forget_nan()
    assert not any(rank.met_nan for rank in state.ranks)
    state.others[0].nan_1.fill_(1)
    state.start_sequence()
    assert not state.met_nan


def test_nothing_behind_the_end_is_gone_to() -> None:
    state = state_behind(40)
    with pytest.raises(ValueError, match="found 41, expected 32 to 40"):
        state.rollback(41)


def test_a_new_sequence_has_not_reached_what_the_one_before_had() -> None:
    state = state_behind(40)
    state.set_position(0)
    state.advance(20)
    assert (state.furthest, state.undoable_tokens) == (20, MAX_DECODE_TOKENS)


def test_a_saved_sequence_takes_back_what_was_kept_of_it() -> None:
    state = state_behind(40)
    state.resume(30, 36)
    assert (state.position, state.furthest, state.undoable_tokens) == (30, 36, 5)


def test_tokens_that_come_again_leave_what_was_reached() -> None:
    state = state_behind(40)
    state.rollback(35)
    state.advance(1)
    assert (state.position, state.furthest, state.undoable_tokens) == (36, 40, 7)


def test_the_end_and_points_reach_eight_tokens_back() -> None:
    state = state_behind(40)
    state.keep_point()
    state.advance(60)
    found = [state.reachable(position) for position in (31, 32, 40, 60, 91, 92, 200)]
    assert found == [0, 32, 40, 40, 40, 92, 100]


def test_a_point_is_needed_only_where_the_rings_do_not_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = state_behind(40)
    state.keep_point()
    state.advance(3)
    monkeypatch.setattr(state, "_restore", None)
    state.go_back(40)
    assert state.position == 40


def test_the_beginning_is_no_point() -> None:
    state = state_behind(0)
    state.keep_point()
    assert state.points == ()


def test_channels_are_brought_together_by_every_move() -> None:
    state = state_behind(40)
    aligned: list[int] = []
    channels: Any = SimpleNamespace(align=lambda: aligned.append(1))
    state.channels = channels
    state.rollback(40)
    assert aligned == [], "no move"
    state.rollback(38)
    assert aligned == [1]


def test_streams_arrive_only_from_other_devices() -> None:
    first, second = torch.device("cpu"), torch.device("meta")
    devices = (first, first, second, second)
    state = DecodeState.allocate(CONFIG, ENGINE, 64, devices, planned=True)
    assert list(state.arrivals) == [(first, second)]


@pytest.mark.parametrize("after", range(4))
def test_a_move_that_is_interrupted_is_made_none_the_less(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks, between any two of their numbers."""
    state = state_behind(40, ranks=2)
    fill = torch.Tensor.fill_
    left = iter(range(after))

    def interrupted(tensor: torch.Tensor, value: int) -> torch.Tensor:
        if next(left, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return fill(tensor, value)

    state.begin_step(3)
    monkeypatch.setattr(torch.Tensor, "fill_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.rollback(37)
    assert (state.position, *numbers(state)) == (37, [37] * 2, [3] * 2)


def test_a_step_that_appends_nothing_leaves_no_rank_behind() -> None:
    state = state_behind(40, ranks=2)
    state.begin_step(2)
    state.begin_step(1)
    with state.staying():
        pass
    assert numbers(state) == ([40] * 2, [0] * 2)
    with pytest.raises(KeyboardInterrupt), state.staying():
        raise KeyboardInterrupt
    assert (state.position, *numbers(state)) == (40, [40] * 2, [3] * 2)


@pytest.mark.parametrize("failing", ["_restore", "_move"])
def test_going_back_to_a_point_ends_there_or_at_the_beginning(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption in the middle of either half of it."""
    state = state_behind(40)
    state.keep_point()
    state.advance(60)
    whole = getattr(state, failing)

    def interrupted(place: object) -> None:
        whole(place)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(state, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.go_back(38)
    assert (state.position, numbers(state)[0]) == (0, [0])


def test_what_a_signal_cuts_off_acts_at_once_or_never() -> None:
    """Not when its traceback is freed, for which something may have begun since."""
    state = state_behind(40)
    cut_off = state.appending()
    cut_off.__enter__()
    state.advance(3)
    del cut_off
    assert state.position == 43


def append_and_be_interrupted(state: DecodeState, tokens: int) -> None:
    with state.appending():
        state.advance(tokens)
        raise KeyboardInterrupt


def numbers(state: DecodeState) -> tuple[list[int], list[int]]:
    """Of every rank, the position on its device and how many steps it has begun."""
    positions = [int(rank.place(torch.device("cpu"))[0]) for rank in state.ranks]
    begun = [int(rank.peers.step_4[0]) for rank in state.ranks if rank.peers is not None]
    return positions, begun
