"""Copies of spans of files from the host to the devices that own their pieces.

A span goes to a device in few large copies, because the link loses microseconds at each one, and is
put where it belongs from there, by a kernel. The ways to do both, the lanes of a device, take
turns: while one puts a span in its place, the next has the link.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.pieces import Span
from dsv4.checkpoint.staging import LANES

# Bytes that a device does not want are copied with the others where they are so few: one copy more
# costs more.
_GAP = 1 << 18


class Lane:
    """A stream of a device, and memory there that spans pass."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        # Earlier work on the memory of the targets may still be running.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def queue(self, parts: Sequence["_Part"], read: Tensor) -> Any:
        """Queues the copies of parts of a span that has been ``read``, uint8 ``[bytes]``, pinned:
        the event behind them. The stream stays the thread's current one.
        """
        torch.cuda.set_stream(self.stream)
        for start, stop in _joined(parts):
            self._memory[start:stop].copy_(read[start:stop], non_blocking=True)
        _put(parts, self._memory)
        return self.stream.record_event()

    def end(self) -> None:
        """Returns when nothing runs on it any more."""
        self.stream.synchronize()


class Lanes:
    """Those of several devices, by device."""

    def __init__(self, lanes: Mapping[torch.device, Sequence[Lane]]) -> None:
        self._turns = {device: cycle(of_device) for device, of_device in lanes.items()}

    def queue(self, span: Span, read: Tensor) -> list[Any]:
        """Queues the copies of a span that has been ``read``: the events behind which all pieces
        are where they belong. What belongs to the host is copied at once.
        """
        events = []
        for device, parts in _parts(span).items():
            if device in self._turns:
                events.append(next(self._turns[device]).queue(parts, read))
            else:
                _put(parts, read)
        return events


@contextmanager
def lanes_to(devices: Sequence[torch.device], nbytes: int) -> Iterator[Lanes]:
    """Lanes for spans of at most ``nbytes``, on which nothing runs any more at the end."""
    lanes = {device: [Lane(device, nbytes) for _ in range(LANES)] for device in devices}
    try:
        yield Lanes(lanes)
    finally:
        for of_device in lanes.values():
            for lane in of_device:
                lane.end()


def copy_on_host(span: Span, read: Tensor) -> None:
    """Copies the pieces of a span that has been ``read``, uint8 ``[bytes]``, to their targets."""
    for parts in _parts(span).values():
        _put(parts, read)


class _Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of a span, for ``target``: all of them, or columns ``first`` to
    ``end`` of their rows of ``width`` bytes.
    """

    start: int
    stop: int
    target: Tensor
    width: int = 0
    first: int = 0
    end: int = 0


def _parts(span: Span) -> dict[torch.device, list[_Part]]:
    """What each device wants of a span."""
    found: defaultdict[torch.device, list[_Part]] = defaultdict(list)
    for _, offset, rows, width, shares, _ in span.pieces:
        start = offset - span.offset
        for target, first, end in shares:
            if rows == 1:
                part = _Part(start + first, start + end, target)
            else:
                part = _Part(start, start + rows * width, target, width, first, end)
            found[target.device].append(part)
    return found


def _joined(parts: Iterable[_Part]) -> Iterator[tuple[int, int]]:
    """The bytes of parts, neighbours together."""
    ranges = sorted([part[:2] for part in parts])
    first, end = ranges[0]
    for start, stop in ranges:
        if start > end + _GAP:
            yield first, end
            first = start
        end = max(end, stop)
    yield first, end


def _put(parts: Iterable[_Part], memory: Tensor) -> None:
    """Copies parts of a span in ``memory``, on the device of their targets, to these."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for start, stop, target, width, first, end in parts:
        if end - first < width:
            columns = memory[start:stop].view(-1, width)[:, first:end]
            target.view(columns.shape).copy_(columns, non_blocking=True)
        else:
            targets.append(target)
            sources.append(memory[start:stop])
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
