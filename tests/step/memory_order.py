"""Whether devices that run side by side touch each other's memory in an order that is certain."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch


class FakeEvent:
    """Stands for ``torch.cuda.Event``."""

    device: torch.device | None = None

    def record(self, stream: "FakeStream") -> None:
        self.device = stream.device
        stream.log.append((stream.device, "record"))


@dataclass
class FakeStream:
    """Stands for the current stream of a device."""

    device: torch.device
    log: list[Any]

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append((self.device, event.device))


class SharedMemory:
    """Who has written and read which memory of whom, and how much of what the others did each one
    has waited for: ranks, or devices by their index.
    """

    def __init__(self, ranks: int) -> None:
        self.clocks = [[0] * ranks for _ in range(ranks)]
        self.accesses: defaultdict[Any, list[tuple[int, int, bool]]] = defaultdict(list)
        self._said: dict[int, list[int]] = {}

    def runs(self, rank: int, what: Any) -> bool:
        """An entry of a log, with what ``FakeStream`` writes: whether it is an item."""
        if what == "record":
            self._said[rank] = list(self.clocks[rank])
        elif isinstance(what, torch.device):
            self.wait_for(rank, self._said[what.index])
        else:
            self.clocks[rank][rank] += 1
            return True
        return False

    def wait_for(self, rank: int, clock: list[int]) -> None:
        """What was done until then is in front of what the rank does next."""
        self.clocks[rank][:] = map(max, self.clocks[rank], clock)

    def touch(self, rank: int, region: Any, writes: bool) -> None:
        """Behind all that must not be at the same time."""
        for other, time, wrote in self.accesses[region]:
            assert not (writes or wrote) or self.clocks[rank][other] >= time, (rank, region)
        self.accesses[region].append((rank, self.clocks[rank][rank], writes))
