"""Engines that take turns on devices.

A kernel that waits for another device keeps its place on a multiprocessor meanwhile. Kernels whose
blocks wait for each other need all places. If each of two engines waits on one device for what the
other one keeps from running on another, both wait for ever. So an engine whose kernels wait for
devices queues its steps behind those of another one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import torch


@dataclass(frozen=True)
class _Holder:
    """Who had the last turn, and the streams on which it was queued."""

    turns: "Turns"
    streams: tuple[torch.cuda.Stream, ...]


_LOCK = RLock()
_HOLDERS: dict[torch.device, _Holder] = {}


class Turns:
    """Of one engine on its ``devices``."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around queueing on the current streams of the devices: behind what others have queued
        there. Nobody else's turn begins meanwhile.
        """
        with _LOCK:
            streams = tuple(torch.cuda.current_stream(device) for device in self._devices)
            found = [_HOLDERS.get(device) for device in self._devices]
            others = {id(one): one for one in found if one and one.turns is not self}
            for other in others.values():
                for theirs in other.streams:
                    left = theirs.record_event()
                    for own in streams:
                        own.wait_event(left)
            holder = _Holder(self, streams)
            _HOLDERS.update(dict.fromkeys(self._devices, holder))
            yield
