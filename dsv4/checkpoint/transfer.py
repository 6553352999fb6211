"""Moves bytes of files to the devices that own them: threads that read the next span of the files
each, one that queues the copies of what they have read, and one that waits for these.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dsv4.checkpoint.lanes import copy_on_host, lanes_to
from dsv4.checkpoint.pieces import GAP, Piece, Span, in_file_order, spans
from dsv4.checkpoint.staging import MORE_BUFFERS, STAGING_BYTES, reader_count
from dsv4.errors import UserError


def transfer(
    pieces: Iterable[Piece], on_bytes: Callable[[int], None], readers: int | None = None
) -> None:
    """Fills the targets of all pieces: a ``Transfer`` beside which nothing else is done."""
    with Transfer(pieces, on_bytes, readers=readers):
        pass


class Transfer:
    """Threads that fill the targets of ``pieces``, in file order, beside the block of its ``with``,
    whose end waits for them.

    ``readers`` threads (None: by the machine) do nothing but read into buffers of
    ``STAGING_BYTES``, pinned for CUDA devices; torch gets them back at the end. For CUDA devices
    one more thread queues the copies of all of them, because threads that each queue their own wait
    for the interpreter more than for the link, and another waits for the copies and looks at what
    is filled, so that neither keeps the link waiting. Files are read, not mapped: one that shrinks
    meanwhile is an error and not a signal.

    ``on_bytes`` is told how many bytes have arrived, ``on_filled`` the name of pieces when all of
    them have, both by any thread. The first error of any thread, or one of the block, Ctrl-C among
    them, ends all threads within one buffer and is raised. ``UserError`` for a file that cannot be
    read or is too short.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        on_bytes: Callable[[int], None],
        on_filled: Callable[[str], None] = lambda _: None,
        readers: int | None = None,
    ) -> None:
        self._pieces = [piece for piece in in_file_order(pieces) if piece.nbytes]
        self._missing: Counter[str] = Counter()
        devices: set[torch.device] = set()
        for piece in self._pieces:
            self._missing[piece.name] += piece.nbytes
            devices.update(share.target.device for share in piece.shares)
        self._devices = sorted((one for one in devices if one.type == "cuda"), key=str)
        total = self._missing.total()
        self._readers = min(readers or reader_count(), -(-total // STAGING_BYTES))
        self._buffer_bytes = min(total + GAP * len(self._pieces), STAGING_BYTES)
        self._spans = spans(self._pieces, STAGING_BYTES)
        self._taking = Lock()
        self._free: SimpleQueue[_Buffer | None] = SimpleQueue()
        self._to_copy: SimpleQueue[_Read | None] = SimpleQueue()
        self._to_settle: SimpleQueue[tuple[_Read, list[Any]] | None] = SimpleQueue()
        self._on_bytes = on_bytes
        self._on_filled = on_filled
        self._changed = Condition()
        self._error: BaseException | None = None
        self._running = 0
        self._stopped = False

    def __enter__(self) -> Self:
        of_gpus = [self._copy_to_gpus, self._settle] if self._devices else []
        jobs = [self._read] * self._readers + of_gpus
        self._running = len(jobs)
        self._threads = ThreadPoolExecutor(max(1, len(jobs)), "dsv4-load")
        with ExitStack() as undo:
            undo.callback(self._end)
            for job in jobs:
                self._threads.submit(job).add_done_callback(self._on_end)
            # Pinned memory takes its time: the first reader has its buffer at once.
            for _ in range((self._readers + MORE_BUFFERS) * bool(jobs)):
                self._free.put(_Buffer.of(self._buffer_bytes, bool(self._devices)))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait_until(self._is_over)
        finally:
            self._end()

    def wait(self, name: str) -> None:
        """Returns when all pieces of this name are filled, and behind the last of all when the
        threads have ended: none may use a device while a graph is captured. Raises the error of any
        thread.
        """
        self._wait_until(lambda: name not in self._missing)
        if not self._missing:
            self._wait_until(self._is_over)

    def _is_over(self) -> bool:
        return not self._running

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_true())
        if self._error is not None:
            raise self._error

    def _on_end(self, thread: "Future[None]") -> None:
        error = thread.exception()
        if error is not None:
            self._stop()
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _end(self) -> None:
        self._stop()
        self._threads.shutdown()

    def _stop(self) -> None:
        """Ends threads that wait for something to do; they look when they get it."""
        self._stopped = True
        for _ in range(self._readers):
            self._free.put(None)

    # Targets that were made in inference mode can be written to only in inference mode, which is a
    # matter of the thread.
    @torch.inference_mode()
    def _read(self) -> None:
        with ExitStack() as files, ExitStack() as end:
            end.callback(self._to_copy.put, None)
            opened: dict[Path, FileIO] = {}
            while (buffer := self._free.get()) is not None and not self._stopped:
                with self._taking:
                    span = next(self._spans, None)
                if span is None:
                    self._free.put(buffer)
                    return
                if span.file not in opened:
                    opened[span.file] = files.enter_context(_open(span.file))
                _read_exactly(opened[span.file], span.offset, buffer.view[: span.nbytes])
                if self._devices:
                    self._to_copy.put(_Read(span, buffer))
                    continue
                copy_on_host(span, buffer.memory)
                self._arrived(span.pieces)
                self._free.put(buffer)

    @torch.inference_mode()
    def _copy_to_gpus(self) -> None:
        readers = self._readers
        with ExitStack() as end:
            end.callback(self._to_settle.put, None)
            lanes = end.enter_context(lanes_to(self._devices, self._buffer_bytes))
            while readers and not self._stopped:
                read = self._to_copy.get()
                if read is None:
                    readers -= 1
                else:
                    events = lanes.queue(read.span, read.buffer.memory)
                    self._to_settle.put((read, events))

    @torch.inference_mode()
    def _settle(self) -> None:
        # What looks at weights does not wait for copies of others.
        with _new_streams(self._devices):
            while (one := self._to_settle.get()) is not None and not self._stopped:
                read, events = one
                for event in events:
                    event.synchronize()
                self._free.put(read.buffer)
                self._arrived(read.span.pieces)

    def _arrived(self, pieces: Iterable[Piece]) -> None:
        arrived: Counter[str] = Counter()
        for piece in pieces:
            arrived[piece.name] += piece.nbytes
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


class _Buffer(NamedTuple):
    """Memory that spans are read into: ``view`` for the operating system."""

    memory: Tensor
    view: memoryview

    @classmethod
    def of(cls, nbytes: int, pinned: bool) -> "_Buffer":
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return cls(memory, memory.numpy().data)


class _Read(NamedTuple):
    """A span and the buffer that it is in."""

    span: Span
    buffer: _Buffer


@contextmanager
def _new_streams(devices: Iterable[torch.device]) -> Iterator[None]:
    """New streams are current, behind which nothing runs any more at the end."""
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as current:
        for stream in streams:
            current.callback(stream.synchronize)
            current.enter_context(torch.cuda.stream(stream))
        yield


def _open(path: Path) -> FileIO:
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if sys.platform == "linux":  # Reads further ahead.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _read_exactly(file: FileIO, offset: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(file.fileno(), [memory[done:]], offset + done)
        except OSError as error:
            raise UserError(f"{file.name}: cannot be read ({error.strerror})") from None
        if not count:
            raise UserError(
                f"{file.name}: truncated: found {offset + done} bytes, "
                f"expected at least {offset + len(memory)}"
            )
        done += count
