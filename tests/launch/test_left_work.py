"""What a launch leaves is done once: by a launch that takes it along, or by one of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Argument, Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.left_work import LeftWork
from dsv4.launch.recording import Recording
from tests.ops.recorded import HOPPER

ALONE = Shape(Kernel("norm/rms_norm", "rms_norm", (("ALONE", 1),)), 1, 64)
OTHER = Shape(Kernel("norm/rms_norm", "rms_norm"), 1, 64, settles=True)


class Left:
    """A recording whose first item has left ``result``."""

    def __init__(self) -> None:
        self.recording = Recording(HOPPER, 1)
        self.read(self.buffer())
        self.result = self.buffer()
        self.work = LeftWork(ALONE, arguments(self.buffer(), self.result), (self.result,))
        self.recording.leave(self.work)

    def buffer(self) -> Tensor:
        return self.recording.empty((1, 64), torch.bfloat16)

    def read(self, tensor: Tensor) -> None:
        self.recording.launch(OTHER, **arguments(tensor, self.buffer()))

    def take_along(self) -> None:
        self.recording.launch(OTHER, **arguments(self.buffer(), self.result))

    def done_alone(self) -> list[int]:
        """The places of launches that do nothing else."""
        items = enumerate(self.recording.items)
        return [at for at, item in items if isinstance(item, Launch) and item.shape is ALONE]


def arguments(x: Tensor, y: Tensor) -> dict[str, Argument]:
    return {"x": x, "weight": None, "y": y, "width": 64, "eps": 0.0}


READERS: dict[str, Callable[[Left], object]] = {
    "a launch": lambda left: left.read(left.result[:1]),
    "a call": lambda left: left.recording.call(print, left.buffer(), left.result),
    "whoever keeps it": lambda left: left.recording.keep(left.result),
    "whoever would read it early": lambda left: left.recording.is_settled(left.result),
}


@pytest.mark.parametrize("reader", READERS)
def test_it_is_done_in_front_of_what_gets_it(reader: str) -> None:
    left = Left()
    left.read(left.buffer())
    READERS[reader](left)
    assert left.done_alone() == [2]
    READERS[reader](left)
    assert left.done_alone() == [2]
    assert left.recording.left() is None


@pytest.mark.parametrize("reader", READERS)
def test_a_launch_that_writes_it_has_taken_it_along(reader: str) -> None:
    left = Left()
    assert left.recording.left() is left.work
    left.take_along()
    assert left.recording.left() is None
    READERS[reader](left)
    assert left.done_alone() == []


def test_who_would_read_it_early_learns_that_it_is_being_written() -> None:
    left = Left()
    assert not left.recording.is_settled(left.result)
    left.read(left.buffer())
    assert left.recording.is_settled(left.result)


def test_items_that_are_gone_have_neither_left_nor_done_it() -> None:
    left = Left()
    (leaving,) = left.recording.items
    left.take_along()
    left.recording.restore([leaving])
    assert left.recording.left() is left.work
    left.recording.restore([])
    assert left.recording.left() is None
    left.read(left.result)
    left.read(left.result)
    assert left.done_alone() == []


def test_what_was_written_before_it_was_left_is_no_sign_that_it_is_done() -> None:
    left = Left()
    left.take_along()
    left.recording.leave(left.work)
    assert left.recording.left() is left.work
    left.read(left.result)
    assert left.done_alone() == [2]


def test_a_later_item_may_leave_work_and_calls_do_none_of_it() -> None:
    left = Left()
    left.take_along()
    later = LeftWork(ALONE, arguments(left.buffer(), left.buffer()), (left.buffer(),))
    left.recording.leave(later)
    assert left.recording.left() is later
    left.recording.call(print, left.buffer())
    assert left.recording.left() is later


def test_nothing_is_left_of_other_work() -> None:
    left = Left()
    assert Recording(HOPPER, 1).left() is None
    later = LeftWork(ALONE, arguments(left.buffer(), left.buffer()), (left.buffer(),))
    left.recording.leave(later)
    assert left.recording.left() is later
    left.read(left.result)
    assert left.done_alone() == [1]
