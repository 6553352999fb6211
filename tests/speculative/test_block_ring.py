"""What the host keeps of steps with drafts that it waits for, with events of this process."""

from typing import Any

import pytest
import torch

from dsv4.speculative import block_ring
from dsv4.speculative.block_ring import BlockRing


class Event:
    """A device's event that has always come, or whose wait is interrupted."""

    interrupted = False

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        if Event.interrupted:
            raise KeyboardInterrupt

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> BlockRing:
    """Of two steps; every step gives one token, 7."""
    monkeypatch.setattr(block_ring.torch.cuda, "Event", Event)
    monkeypatch.setattr(block_ring.torch.cuda, "current_stream", lambda _: None)
    ring_3R = torch.tensor([[7], [1], [0]]).expand(3, 16)
    return BlockRing(ring_3R, torch.device("cpu"), steps=2)


def test_an_interrupted_wait_costs_no_step(
    ring: BlockRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        ring.begin()
        ring.begin()
        monkeypatch.setattr(Event, "interrupted", True)
        with pytest.raises(KeyboardInterrupt):
            ring.read(0)
        ring.forget()
        monkeypatch.setattr(Event, "interrupted", False)
    ring.begin()
    ring.begin()
    assert [ring.read(position).tokens for position in (0, 1)] == [[7], [7]]
