"""Copies of spans of files from the host to the devices that own their pieces.

A span goes to a device in few large copies, because the link loses microseconds at each one, and is
put where it belongs from there, by a kernel that finds a table of its parts behind it. The ways to
do both, the lanes of a device, take turns: while one puts a span in its place, the next has the
link.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint.pieces import Span
from dsv4.checkpoint.staging import LANES
from dsv4.integers import round_up
from dsv4.ops.scatter import Part, scatter
from dsv4.ops.scatter.cuda import PART_BYTES, Scatter, kernel_target, table_words

# Bytes that a device does not want are copied with the others where they are so few: one copy more
# costs more.
_GAP = 1 << 18
# Of the table behind a span.
_ALIGNMENT = 8


class Lane:
    """A stream of a device, and memory there that spans pass."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        # Earlier work on the memory of the targets may still be running.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target = kernel_target(device)
        self._scatter = None if target is None else Scatter(target, self._memory, self.stream)

    def queue(self, parts: Sequence[Part], read: Tensor, free: int) -> Any:
        """Queues the copies of parts of a span that has been ``read``, uint8 ``[bytes]``, pinned,
        of as many bytes as the lane's memory: the event behind them. From byte ``free`` of it on
        there is room for a table. The stream stays the thread's current one.
        """
        torch.cuda.set_stream(self.stream)
        ranges = [(part.start, part.stop) for part in parts]
        end = free + PART_BYTES * len(parts)
        kernel = self._scatter if end <= read.numel() else None
        if kernel is not None:
            words = table_words(parts)
            struct.pack_into(f"{len(words)}q", read.numpy().data, free, *words)
            ranges.append((free, end))
        for start, stop in _joined(ranges):
            self._memory[start:stop].copy_(read[start:stop], non_blocking=True)
        if kernel is not None:
            kernel.queue(free, len(parts))
        else:
            scatter(self._memory, parts)
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
        free = round_up(span.nbytes, _ALIGNMENT)
        for device, parts in _parts(span).items():
            if device in self._turns:
                events.append(next(self._turns[device]).queue(parts, read, free))
                free += PART_BYTES * len(parts)
            else:
                scatter(read, parts)
        return events


def prepare(devices: Iterable[torch.device]) -> None:
    """Loads what lanes to these GPUs launch. To be called before a thread makes lanes: two that
    import cuda.core at the same time see half of it.
    """
    for device in devices:
        kernel_target(device)


@contextmanager
def lanes_to(devices: Sequence[torch.device], nbytes: int) -> Iterator[Lanes]:
    """Lanes for buffers of ``nbytes``, on which nothing runs any more at the end."""
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
        scatter(read, parts)


def _parts(span: Span) -> dict[torch.device, list[Part]]:
    """What each device wants of a span."""
    found: defaultdict[torch.device, list[Part]] = defaultdict(list)
    for _, offset, rows, width, shares, _ in span.pieces:
        start = offset - span.offset
        for target, first, end in shares:
            if rows == 1:
                part = Part(start + first, start + end, target)
            else:
                part = Part(start, start + rows * width, target, width, first, end)
            found[target.device].append(part)
    return found


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The bytes from first to last ones, neighbours together."""
    ascending = sorted(ranges)
    first, end = ascending[0]
    for start, stop in ascending:
        if start > end + _GAP:
            yield first, end
            first = start
        end = max(end, stop)
    yield first, end
