"""Turns of engines on devices, on stand-ins for streams: whose work waits for whose."""

from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from dsv4 import turns
from dsv4.turns import Turns

GPUS = tuple(torch.device("cuda", index) for index in range(3))


class Stream:
    """Which streams' work it has waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


class World:
    """The current stream of every device, of whoever is ``now``."""

    def __init__(self) -> None:
        self.now = "a"
        self._streams: dict[tuple[str, torch.device], Stream] = {}

    def stream(self, device: torch.device) -> Stream:
        key = (self.now, device)
        return self._streams.setdefault(key, Stream(f"{self.now}{device.index}"))

    def take(self, who: str, own: Turns) -> list[list[str]]:
        """What the streams of an engine have waited for in this turn, by device."""
        self.now = who
        with own.taken():
            found = [self.stream(device) for device in own._devices]
        waited = [stream.waited for stream in found]
        for stream in found:
            stream.waited = []
        return waited


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    cuda = SimpleNamespace(current_stream=made.stream)
    monkeypatch.setattr(turns, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(turns, "_HOLDERS", {})
    return made


def test_an_engine_alone_waits_for_nobody(world: World) -> None:
    own = Turns(GPUS[:2])
    for _ in range(3):
        assert world.take("a", own) == [[], []]


def test_another_engine_waits_for_all_that_was_queued(world: World) -> None:
    first, second = Turns(GPUS[:2]), Turns(GPUS[:2])
    world.take("a", first)
    assert world.take("b", second) == [["a0", "a1"], ["a0", "a1"]]
    assert world.take("b", second) == [[], []]
    assert world.take("a", first) == [["b0", "b1"], ["b0", "b1"]]


def test_engines_on_other_devices_do_not_wait(world: World) -> None:
    world.take("a", Turns(GPUS[:1]))
    assert world.take("b", Turns(GPUS[1:])) == [[], []]


def test_one_common_device_is_enough_to_wait_for_all(world: World) -> None:
    """What goes on elsewhere may be what the common one waits for."""
    first, second, third = Turns(GPUS[:2]), Turns(GPUS[1:]), Turns(GPUS[:1])
    world.take("a", first)
    assert world.take("b", second) == [["a0", "a1"], ["a0", "a1"]]
    # Its device was last used by the first engine.
    assert world.take("c", third) == [["a0", "a1"]]


def test_every_engine_that_was_last_on_one_of_the_devices_is_waited_for(world: World) -> None:
    world.take("a", Turns(GPUS[:1]))
    world.take("b", Turns(GPUS[1:2]))
    assert world.take("c", Turns(GPUS[:2])) == [["a0", "b1"], ["a0", "b1"]]


def test_what_an_interrupted_turn_has_queued_is_waited_for(world: World) -> None:
    def interrupted(own: Turns) -> None:
        with own.taken():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(Turns(GPUS[:1]))
    assert world.take("b", Turns(GPUS[:1])) == [["a0"]]


def test_the_work_of_an_engine_that_is_gone_is_waited_for(world: World) -> None:
    world.take("a", Turns(GPUS[:2]))
    assert world.take("b", Turns(GPUS[:2])) == [["a0", "a1"], ["a0", "a1"]]


def test_nobody_begins_while_another_one_queues(world: World) -> None:
    first, second = Turns(GPUS[:2]), Turns(GPUS[:2])
    begun = Event()

    def take() -> None:
        with second.taken():
            begun.set()

    with first.taken():
        # A turn inside its own turn is the same one.
        with first.taken():
            pass
        thread = Thread(target=take)
        thread.start()
        assert not begun.wait(0.05)
    thread.join(10)
    assert begun.is_set()
