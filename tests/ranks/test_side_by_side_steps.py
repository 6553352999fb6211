"""A step of all ranks on stand-ins for theirs: what each is asked, in what order, and how their
values are put together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.step import lock_step
from dsv4.step.lock_step import Feeds, JoinedValues, LockStep, check_token
from dsv4.step.parts import Barrier, Part
from tests.step.planned_model import GPUS

FIRST, SECOND, CHOICE = (
    Part(kind, GPUS[0], None, 0, 1) for kind in ("attention", "experts", "sample")
)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is queued, counted and crossed."""
    entries: list[Any] = []

    class FakeBarrier:
        def __init__(self, count: int) -> None:
            self.count = count

        def cross(self, streams: list[Any]) -> None:
            entries.append(("barrier", self.count, streams))

    monkeypatch.setattr(lock_step, "StreamBarrier", FakeBarrier)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"stream of {device}")
    return entries


def ranks_of(log: list[Any], feeds: bool = True) -> LockStep:
    """Two ranks; steps that end at up to 100 tokens are dense."""

    def rank(index: int) -> Any:
        def run_part(*asked: Any) -> None:
            log.append((index, *asked))

        def show(seen: Any, position: int) -> None:
            seen("layers.0.attn.q", torch.full((1, 1, 2), float(index)))
            seen("layers.0.attn.heads", torch.full((1, 1, 2), float(index)))
            seen("streams", torch.full((1, 2), float(index + position)))

        recorded = SimpleNamespace(
            head=GPUS[index], steps_begun=3 if index == 0 else 7, is_dense=lambda end: end <= 100
        )
        return SimpleNamespace(
            recorded=recorded,
            feed=SimpleNamespace(pass_on=lambda: log.append((index, "pass on"))) if feeds else None,
            tokens=8,
            model_parts=[FIRST, Barrier(GPUS[index]), SECOND],
            sample_parts=[CHOICE],
            run_part=run_part,
            show=show,
        )

    @contextmanager
    def turn() -> Iterator[None]:
        log.append("turn")
        yield
        log.append("end of turn")

    state: Any = SimpleNamespace(begin_step=lambda steps: log.append(("begun", steps)), turn=turn)
    return LockStep([rank(0), rank(1)], state)


@pytest.mark.parametrize(("end", "dense"), [(100, True), (101, False)])
def test_ranks_run_part_by_part_inside_one_turn(log: list[Any], end: int, dense: bool) -> None:
    """Steps are counted before any is queued, also where an interruption ends it."""
    observer: Any = object()
    ranks_of(log).run(5, end, observer)
    parts = [[(rank, part, 5, dense, observer) for rank in range(2)] for part in (FIRST, SECOND)]
    barrier = ("barrier", 2, ["stream of cuda:0", "stream of cuda:1"])
    assert log == [("begun", 3), "turn", *parts[0], barrier, *parts[1], "end of turn"]


def test_every_rank_chooses_inside_a_turn_and_no_step_is_counted(log: list[Any]) -> None:
    observer: Any = object()
    ranks_of(log).sample(observer)
    choices = [(rank, CHOICE, 1, False, observer) for rank in range(2)]
    assert log == ["turn", *choices, "end of turn"]


def test_the_inputs_are_those_of_all_ranks_or_there_are_none(log: list[Any]) -> None:
    feed = ranks_of(log).feed
    assert isinstance(feed, Feeds)
    feed.pass_on()
    assert log == [(0, "pass on"), (1, "pass on")]
    assert ranks_of(log, feeds=False).feed is None


def test_heads_of_all_ranks_are_shown_with_what_rank_0_has(log: list[Any]) -> None:
    shown: list[tuple[str, Any]] = []
    ranks_of(log).show(lambda name, rows: shown.append((name, rows.tolist())), 5)
    heads = [[[0.0, 0.0], [1.0, 1.0]]]
    assert shown == [
        ("layers.0.attn.q", heads),
        ("layers.0.attn.heads", heads),
        ("streams", [[5.0, 5.0]]),
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_values_come_in_the_order_of_rank_0_whoever_is_first(order: tuple[int, ...]) -> None:
    """Of one step after another, whose values have the same names."""
    shown: list[tuple[str, list[float]]] = []

    def seen(name: str, rows: Tensor) -> None:
        shown.append((name, rows.flatten().tolist()))

    joined = JoinedValues(seen, 3)
    for step in (10, 20):
        for rank in order:
            values = joined.of(rank)
            for name in ("kv", "attn.heads", "output"):
                values(name, torch.full((1, 1), float(step + rank)))
        heads = [step + rank for rank in range(3)]
        expected = [("kv", [step]), ("attn.heads", heads), ("output", [step])]
        assert shown == expected
        shown.clear()


def test_nothing_is_shown_in_front_of_heads_that_a_rank_lacks() -> None:
    shown: list[str] = []
    joined = JoinedValues(lambda name, rows: shown.append(name), 3)
    for rank in (0, 1):
        joined.of(rank)("attn.q", torch.zeros(1, 1))
        joined.of(rank)("output", torch.zeros(1, 1))
    assert shown == []
    joined.of(2)("attn.q", torch.zeros(1, 1))
    assert shown == ["attn.q", "output"]


@pytest.mark.parametrize(
    ("token", "expected", "message"),
    [
        (0, 5, "found token 0 of rank 2 at position 9, expected 5 as of rank 0"),
        (5, 0, "found token 5 of rank 2 at position 9, expected 0 as of rank 0"),
        (None, 0, "found no token of rank 2 at position 9, expected 0 as of rank 0"),
        (0, None, "found token 0 of rank 2 at position 9, expected none as of rank 0"),
    ],
)
def test_token_0_is_a_token_too(token: int | None, expected: int | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^ranks: {message}$"):
        check_token(token, expected, 2, 9)


@pytest.mark.parametrize("token", [None, 0, 100_000])
def test_the_token_of_rank_0_is_right(token: int | None) -> None:
    check_token(token, None if token is None else int(str(token)), 1, 9)
