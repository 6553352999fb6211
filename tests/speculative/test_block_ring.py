"""What the host keeps of steps with drafts that it waits for, with events of this process."""

from typing import Any

import pytest
import torch

from dsv4.speculative import block_ring
from dsv4.speculative.block_ring import BlockRing


class Event:
    """A device's event that has always come, or whose wait is interrupted."""

    interrupted = False
    awaited: "list[Event]"
    milliseconds = 0.0

    def __init__(self, **_: Any) -> None:
        self.recorded = 0.0

    def record(self, _: Any) -> None:
        self.recorded = Event.milliseconds

    def synchronize(self) -> None:
        if Event.interrupted:
            raise KeyboardInterrupt
        Event.awaited.append(self)

    def elapsed_time(self, end: "Event") -> float:
        return end.recorded - self.recorded


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> BlockRing:
    """Of two steps; every step gives one token, 7."""
    monkeypatch.setattr(Event, "awaited", [], raising=False)
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


def test_a_step_has_its_tokens_behind_its_position_and_its_counts_at_it(ring: BlockRing) -> None:
    """Around the end of the ring, again and again with the same events."""
    ring_3R = torch.zeros((3, 16), dtype=torch.int64)
    ring_3R[0] = torch.arange(100, 116)
    ring_3R[1:, 13] = torch.tensor([5, 4])
    ring._ring = ring_3R
    ring.begin()
    for _ in range(3):
        ring.begin()
        oldest = ring._queued[0].settled
        given = ring.read(16 + 13)
        assert given.tokens == [114, 115, 100, 101, 102]
        assert given.drafted == 4
        assert Event.awaited[-1] is oldest


def test_a_step_has_its_own_times_of_drafting_and_of_verifying(
    ring: BlockRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step queued behind it, whose times are others."""
    marks = (ring.begin, ring.mark_drafted, ring.mark_settled)
    for mark, now in zip(2 * marks, (0.0, 1.0, 3.0, 3.0, 8.0, 20.0), strict=True):
        monkeypatch.setattr(Event, "milliseconds", now)
        mark()
    assert ring.read(0).seconds == pytest.approx((0.001, 0.002))
    assert ring.read(1).seconds == pytest.approx((0.005, 0.012))
