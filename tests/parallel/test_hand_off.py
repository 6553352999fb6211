"""HandOff on stand-ins for streams: what arrives is what was sent, in whatever order the streams
run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.parallel import hand_off
from dsv4.parallel.hand_off import HandOff

SOURCE = torch.device("cuda", 0)
TARGET = torch.device("cuda", 1)
HOST = torch.device("cpu")


class Mark:
    """A point of a stream, reached or not."""

    def __init__(self) -> None:
        self.reached = False


class Stream:
    """Work in its order; ``step`` does the first of it unless it waits for a mark."""

    def __init__(self, *_: object) -> None:
        self.queue: list[Mark | Callable[[], None]] = []

    def wait_event(self, event: "Event") -> None:
        """An event that was never recorded holds nothing back."""
        if event.mark is not None:
            self.queue.append(event.mark)

    def step(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        if isinstance(first, Mark):
            if not first.reached:
                return False
        else:
            first()
        del self.queue[0]
        return True


class Event:
    mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = Mark()
        self.mark = mark
        stream.queue.append(lambda: setattr(mark, "reached", True))


class Buffer:
    """Memory of one value. ``copy_`` is queued as torch does it: on the source's current stream,
    and the streams of both devices wait for each other; pinned memory has no stream.
    """

    shape = (1,)
    dtype = torch.float32
    value: object = None
    rows: slice | None = None

    def __init__(self, world: "World", device: torch.device) -> None:
        self.world = world
        self.device = device

    def __getitem__(self, rows: slice) -> "Buffer":
        self.rows = rows
        return self

    def copy_(self, other: "Buffer", non_blocking: bool) -> None:
        assert non_blocking
        on_gpus = [end for end in (other.device, self.device) if end != HOST]
        copying, waiting = (self.world.streams[on_gpus[at]] for at in (0, -1))
        ready = Event()
        ready.record(waiting)
        copying.wait_event(ready)
        copying.queue.append(lambda: setattr(self, "value", other.value))
        copied = Event()
        copied.record(copying)
        waiting.wait_event(copied)


class World:
    """Two devices with a current stream each, in place of ``torch`` in the module under test."""

    def __init__(self, peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = {SOURCE: Stream(), TARGET: Stream()}
        self.all = [*self.streams.values()]
        cuda = SimpleNamespace(
            can_device_access_peer=lambda *_: peers,
            device=lambda _: nullcontext(),
            Stream=self.new_stream,
            Event=Event,
            current_stream=self.streams.__getitem__,
            stream=self.on_stream,
        )
        self.pinned = Buffer(self, HOST)
        stand_in = SimpleNamespace(cuda=cuda, empty=lambda *_, **__: self.pinned)
        monkeypatch.setattr(hand_off, "torch", stand_in)

    def new_stream(self, device: torch.device) -> Stream:
        self.all.append(Stream())
        return self.all[-1]

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before = self.streams[TARGET]
        self.streams[TARGET] = stream
        yield
        self.streams[TARGET] = before

    def run(self, order: Sequence[int]) -> None:
        """Everything queued, a piece at a time of the first stream of ``order`` that can go on."""
        while any(self.all[index].step() for index in order):
            pass
        assert not any(stream.queue for stream in self.all), "streams wait for each other"


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
@pytest.mark.parametrize("drained", [True, False], ids=["drained", "not drained"])
@pytest.mark.parametrize("peers", [True, False], ids=["peers", "through the host"])
def test_every_tensor_arrives_before_it_is_read_and_stays_until_then(
    peers: bool, drained: bool, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(peers, monkeypatch)
    sent: Any = Buffer(world, SOURCE)
    arrived: Any = Buffer(world, TARGET)
    seen: list[object] = []
    passing = HandOff(SOURCE, arrived)
    for number in range(5):
        world.streams[SOURCE].queue.append(lambda n=number: setattr(sent, "value", n))
        passing.send(sent)
        for _ in range(2):
            world.streams[TARGET].queue.append(lambda: seen.append(arrived.value))
        if drained:
            passing.drain()
    world.run(order)
    assert seen == [number for number in range(5) for _ in range(2)]
    assert arrived.rows == slice(None, 1)
    assert world.pinned.rows == (None if peers else slice(None, 1))


def test_the_source_goes_on_while_the_target_still_works_on_what_it_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind ``drain`` the target's work holds the next copy back no more."""
    world = World(True, monkeypatch)
    sent: Any = Buffer(world, SOURCE)
    arrived: Any = Buffer(world, TARGET)
    passing = HandOff(SOURCE, arrived)
    passing.send(sent)
    passing.drain()
    world.streams[TARGET].queue.append(Mark())
    world.streams[SOURCE].queue.append(lambda: setattr(sent, "value", "second"))
    passing.send(sent)
    while any(stream.step() for stream in world.all):
        pass
    assert arrived.value == "second"
    assert len(world.streams[TARGET].queue) > 0
