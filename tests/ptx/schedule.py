"""In which order the machine does what the ISA leaves open."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """A way to resolve every choice, the same each time it is used.

    ``asynchronous``: copies and products happen as early or as late as they may, or at any time.
    ``warps``: a running warp is followed by any other, or gives way to the one of the highest
    random priority at every synchronising instruction. ``turn``: most instructions of a turn.
    """

    name: str
    asynchronous: Literal["early", "late", "random"]
    warps: Literal["random", "priority"]
    turn: int
    seed: int


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("late", "late", "random", 200, 1),
        Schedule("early", "early", "random", 200, 2),
        Schedule("random", "random", "random", 60, 3),
        Schedule("priority late", "late", "priority", 1000, 4),
        Schedule("priority early", "early", "priority", 1000, 5),
        Schedule("priority random", "random", "priority", 1000, 6),
        Schedule("short turns", "random", "random", 4, 7),
        Schedule("other priority", "late", "priority", 1000, 8),
    )
}
"""The eight named schedules."""


def random_schedule(seed: int) -> Schedule:
    """Any schedule; equal seeds give equal ones."""
    choose = random.Random(seed)
    return Schedule(
        f"seed {seed}",
        choose.choice(("early", "late", "random")),
        choose.choice(("random", "priority")),
        choose.choice((4, 60, 200, 1000)),
        seed,
    )


class Choices:
    """The decisions of one execution under a schedule."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._random = random.Random(schedule.seed)

    def one(self, items: Sequence[T]) -> T:
        """Any of the items."""
        return items[self._random.randrange(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in any order."""
        return self._random.sample(items, len(items))

    def priority(self) -> float:
        """A warp's priority."""
        return self._random.random()

    def turn(self) -> int:
        """How many instructions a warp executes before another one may."""
        if self.schedule.warps == "priority":
            return self.schedule.turn
        return self._random.randint(1, self.schedule.turn)

    def asynchronous_now(self) -> bool:
        """Whether something asynchronous happens now although warps could run."""
        if self.schedule.asynchronous == "random":
            return self._random.random() < 0.3
        return self.schedule.asynchronous == "early"

    def early(self) -> bool:
        """Whether what a thread waits for later has its effect already when it is issued."""
        if self.schedule.asynchronous == "random":
            return self._random.random() < 0.5
        return self.schedule.asynchronous == "early"
