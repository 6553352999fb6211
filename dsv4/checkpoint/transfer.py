"""Moves bytes of files to the devices that own them: threads that take the next span of the files
each, and copy one while they read another.
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import FileIO
from threading import Condition, Lock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from dsv4.checkpoint.pieces import GAP, Piece, Share, Span, in_file_order, spans
from dsv4.errors import UserError

STAGING_BYTES = 16 << 20
BUFFERS = 2
MAX_READERS = 8

Streams = dict[torch.device, torch.cuda.Stream]


def reader_count() -> int:
    """How many threads read: those of a large machine are more than its memory can feed."""
    return min(MAX_READERS, os.cpu_count() or 1)


def staging_bytes() -> int:
    """The most memory of the host that the bytes of a load pass at once."""
    return reader_count() * BUFFERS * STAGING_BYTES


def transfer(
    pieces: Iterable[Piece], on_bytes: Callable[[int], None], readers: int | None = None
) -> None:
    """Fills the targets of all pieces: a ``Transfer`` beside which nothing else is done."""
    with Transfer(pieces, on_bytes, readers=readers):
        pass


class Transfer:
    """Threads that fill the targets of ``pieces``, in file order, beside the block of its ``with``,
    whose end waits for them.

    ``on_bytes`` is told how many bytes have arrived, ``on_filled`` the name of pieces when all of
    them have; both by any of the ``readers`` threads (None: by the machine). Files are read, not
    mapped: a file that shrinks meanwhile is an error and not a signal. The bytes pass ``BUFFERS``
    buffers of ``STAGING_BYTES`` a thread, pinned for CUDA devices, which torch gets back at the
    end. The first error of any thread, or one of the block, Ctrl-C among them, ends all threads
    within one buffer and is raised. ``UserError`` for a file that cannot be read or is too short.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        on_bytes: Callable[[int], None],
        on_filled: Callable[[str], None] = lambda _: None,
        readers: int | None = None,
    ) -> None:
        ordered = [piece for piece in in_file_order(pieces) if piece.nbytes]
        self._missing: Counter[str] = Counter()
        for piece in ordered:
            self._missing[piece.name] += piece.nbytes
        total = self._missing.total()
        self._readers = min(readers or reader_count(), -(-total // STAGING_BYTES))
        self._buffer_bytes = min(total + GAP * len(ordered), STAGING_BYTES)
        self._devices: set[torch.device] = set()
        self._column_devices: set[torch.device] = set()
        for piece in ordered:
            on_cuda = {one.target.device for one in piece.shares if one.target.is_cuda}
            self._devices |= on_cuda
            self._column_devices |= on_cuda if piece.rows > 1 else set()
        self._spans = spans(ordered, STAGING_BYTES)
        self._taking = Lock()
        self._on_bytes = on_bytes
        self._on_filled = on_filled
        self._changed = Condition()
        self._error: BaseException | None = None
        self._ended = 0
        self._stopped = False

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(max(1, self._readers), "dsv4-load")
        for _ in range(self._readers):
            self._threads.submit(self._fill).add_done_callback(self._on_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait_until(self._is_over)
        finally:
            self._stopped = True
            self._threads.shutdown()

    def wait(self, name: str) -> None:
        """Returns when all pieces of this name are filled, and behind the last of all when the
        threads have ended: none may use a device while a graph is captured. Raises the error of any
        thread.
        """
        self._wait_until(lambda: name not in self._missing)
        if not self._missing:
            self._wait_until(self._is_over)

    def _is_over(self) -> bool:
        return self._ended == self._readers

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_true())
        if self._error is not None:
            raise self._error

    def _on_end(self, thread: "Future[None]") -> None:
        with self._changed:
            self._ended += 1
            self._error = self._error or thread.exception()
            self._stopped |= self._error is not None
            self._changed.notify_all()

    # Targets that were made in inference mode can be written to only in inference mode, which is a
    # matter of the thread.
    @torch.inference_mode()
    def _fill(self) -> None:
        with _own_streams(self._devices) as streams:
            unsorted = {
                device: torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
                for device in self._column_devices
            }
            sizes = [self._buffer_bytes] * BUFFERS
            buffers = deque(_Buffer(nbytes, streams, unsorted) for nbytes in sizes)
            while (span := self._next_span()) is not None:
                self._arrived(buffers[0].filled())
                buffers[0].fill(span)
                buffers.rotate(-1)
            while buffers and not self._stopped:
                self._arrived(buffers.popleft().filled())

    def _next_span(self) -> Span | None:
        with self._taking:
            return None if self._stopped else next(self._spans, None)

    def _arrived(self, pieces: Iterable[Piece]) -> None:
        arrived: Counter[str] = Counter()
        for piece in pieces:
            arrived[piece.name] += piece.nbytes
        if arrived:
            self._on_bytes(arrived.total())
        for name, nbytes in arrived.items():
            with self._changed:
                self._missing[name] -= nbytes
                is_filled = not self._missing[name]
            if is_filled:
                self._on_filled(name)
                with self._changed:
                    del self._missing[name]
                    self._changed.notify_all()


@contextmanager
def _own_streams(
    devices: Iterable[torch.device],
) -> Iterator[dict[torch.device, torch.cuda.Stream]]:
    """Streams that are this thread's current ones; at the end they have done everything."""
    streams = {device: torch.cuda.Stream(device) for device in devices}
    with ExitStack() as current:
        for device, stream in streams.items():
            # Earlier work on the memory of the targets may still be running.
            stream.wait_stream(torch.cuda.current_stream(device))
            current.enter_context(torch.cuda.stream(stream))
        try:
            yield streams
        finally:
            for stream in streams.values():
                stream.synchronize()


class _Buffer:
    """Memory that one span after the other is read into, and copied from by ``streams``: pinned
    where there are some. ``unsorted``: where rows arrive on a device of which it keeps columns.
    """

    def __init__(
        self,
        nbytes: int,
        streams: Streams,
        unsorted: dict[torch.device, Tensor],
    ) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(streams))
        self._unsorted = unsorted
        # A thread sleeps while it waits for them.
        self._copied = {stream: torch.cuda.Event(blocking=True) for stream in streams.values()}
        self._pieces: tuple[Piece, ...] = ()

    def filled(self) -> tuple[Piece, ...]:
        """The pieces of the last span, once they have arrived; then the buffer is free again."""
        for event in self._copied.values():
            event.synchronize()
        pieces = self._pieces
        self._pieces = ()
        return pieces

    def fill(self, span: Span) -> None:
        """Reads a span and queues the copies of its pieces."""
        _read_span(span, self._memory[: span.nbytes])
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece in span.pieces:
            read = span.bytes_of(piece, self._memory)
            for share in piece.shares:
                is_whole = share.stop - share.first == piece.width
                if piece.rows > 1 and not is_whole:
                    self._copy_columns(share, read.view(piece.rows, piece.width))
                    continue
                targets.append(share.target)
                sources.append(read if is_whole else read[share.first : share.stop])
        if targets:
            # One call of torch: with one for each, threads would wait for the interpreter.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for stream, event in self._copied.items():
            event.record(stream)
        self._pieces = span.pieces

    def _copy_columns(self, share: Share, rows: Tensor) -> None:
        """Copies columns of ``rows``, uint8 ``[rows, width]``. To a GPU the whole rows cross: torch
        would pick columns on the host.
        """
        unsorted = self._unsorted.get(share.target.device)
        if unsorted is not None:
            arrived = unsorted[: rows.numel()].view(rows.shape)
            rows = arrived.copy_(rows, non_blocking=True)
        columns = rows[:, share.first : share.stop]
        share.target.view(columns.shape).copy_(columns, non_blocking=True)


def _read_span(span: Span, memory: Tensor) -> None:
    try:
        with span.file.open("rb", buffering=0) as file:
            if sys.platform == "linux":  # Reads further ahead.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            _read_exactly(file, span.offset, memory)
    except OSError as error:
        raise UserError(f"{span.file}: cannot be read ({error.strerror})") from None


def _read_exactly(file: FileIO, offset: int, memory: Tensor) -> None:
    file.seek(offset)
    rest = memory.numpy().data
    while rest:
        count = file.readinto(rest)
        if not count:
            expected = offset + memory.numel()
            raise UserError(
                f"{file.name}: truncated: found {expected - len(rest)} bytes, "
                f"expected at least {expected}"
            )
        rest = rest[count:]
