"""Moves spans of files to GPUs: one thread has the reads and the copies going and looks at what has
ended, so that nothing waits for the interpreter.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.background_reads import BackgroundReads
from dsv4.checkpoint.lanes import Lanes, lanes_to
from dsv4.checkpoint.pieces import Span
from dsv4.checkpoint.staging import MORE_BUFFERS, TABLE_BYTES

# Seconds after which the copies are looked at while reads are running, and after which somebody
# who stops all is noticed.
_COPY_TIME = 1e-4
_NOTICE_TIME = 0.05


def move_to_gpus(
    spans: Iterator[Span],
    devices: Sequence[torch.device],
    nbytes: int,
    readers: int,
    arrived: Callable[[Span], None],
    is_stopped: Callable[[], bool],
) -> None:
    """Reads ``spans`` of at most ``nbytes``, ``readers`` at once, into pinned memory, which torch
    gets back at the end, and copies them to the targets of their pieces. ``arrived`` is called
    with each, under streams of its own: what looks at weights does not wait for copies of others.

    Ends when all have arrived, or soon after ``is_stopped``. Raises ``UserError`` for a file that
    cannot be read or is too short.
    """
    with (
        _new_streams(devices) as streams,
        lanes_to(devices, nbytes + TABLE_BYTES) as lanes,
        BackgroundReads(readers + MORE_BUFFERS) as reads,
    ):

        def settle(spans: Sequence[Span]) -> None:
            # The current ones are those of lanes.
            for stream in streams:
                torch.cuda.set_stream(stream)
            for span in spans:
                arrived(span)

        moving = _Moving(lanes, reads, nbytes, readers, settle)
        following = next(spans, None)
        while not is_stopped() and (following is not None or moving.is_busy):
            while following is not None and moving.has_room:
                moving.begin(following)
                following = next(spans, None)
            moving.go_on()


class _Copy(NamedTuple):
    """A span on its way from the buffer of ``slot``, and the events at its end."""

    slot: int
    span: Span
    events: list[Any]


class _Moving:
    """The buffers, each with a slot for its reads, and what goes on in them."""

    def __init__(
        self,
        lanes: Lanes,
        reads: BackgroundReads,
        nbytes: int,
        readers: int,
        arrived: Callable[[Sequence[Span]], None],
    ) -> None:
        self._lanes = lanes
        self._reads = reads
        self._nbytes = nbytes
        self._readers = readers
        self._arrived = arrived
        self._buffers: list[Tensor] = []
        self._free: list[int] = []
        self._reading: dict[int, Span] = {}
        self._copying: deque[_Copy] = deque()
        self._has_new_buffer = False

    @property
    def is_busy(self) -> bool:
        """Whether anything is read or copied."""
        return bool(self._reading or self._copying)

    @property
    def has_room(self) -> bool:
        """Whether another span can be read now. New pinned memory takes milliseconds, in which
        what was read is not copied: one buffer at a time.
        """
        can_grow = len(self._buffers) < self._readers + MORE_BUFFERS and not self._has_new_buffer
        return len(self._reading) < self._readers and (bool(self._free) or can_grow)

    def begin(self, span: Span) -> None:
        """Begins to read one; there must be room."""
        if not self._free:
            self._free.append(len(self._buffers))
            self._buffers.append(_pinned(self._nbytes + TABLE_BYTES))
            self._has_new_buffer = True
        # The one that was used last may still be in the processor's cache.
        slot = self._free.pop()
        self._reading[slot] = span
        memory = self._buffers[slot][: span.nbytes]
        self._reads.begin(slot, span.file, span.offset, memory)

    def go_on(self) -> None:
        """Queues the copies of what has been read and settles what has arrived; waits a little if
        there is neither.
        """
        seconds = _COPY_TIME if self._copying else _NOTICE_TIME
        if self._has_new_buffer:
            seconds = 0.0
            self._has_new_buffer = False
        if self._reading:
            for slot in self._reads.finished(seconds):
                span = self._reading.pop(slot)
                events = self._lanes.queue(span, self._buffers[slot])
                self._copying.append(_Copy(slot, span, events))
        elif self._copying:
            for event in self._copying[0].events:
                event.synchronize()
        arrived = []
        while self._copying and all(event.query() for event in self._copying[0].events):
            copied = self._copying.popleft()
            self._free.append(copied.slot)
            arrived.append(copied.span)
        if arrived:
            self._arrived(arrived)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def _new_streams(devices: Iterable[torch.device]) -> Iterator[list[torch.cuda.Stream]]:
    """New streams, on which nothing runs any more at the end."""
    streams = [torch.cuda.Stream(device) for device in devices]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.synchronize()
