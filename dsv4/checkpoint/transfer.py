"""Moves bytes of files to the devices that own them, beside what else is done: a thread to GPUs,
or threads that read and copy the next span of the files each.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from itertools import groupby, takewhile
from pathlib import Path
from threading import Condition, Lock
from types import TracebackType
from typing import Self

import torch

from dsv4.checkpoint.background_reads import open_sequential, too_short, unreadable
from dsv4.checkpoint.lanes import copy_on_host, prepare
from dsv4.checkpoint.pieces import GAP, Piece, Span, in_file_order, spans
from dsv4.checkpoint.staging import STAGING_BYTES, reader_count
from dsv4.checkpoint.to_gpus import move_to_gpus
from dsv4.checkpoint.uncollected import uncollected
from dsv4.integers import ceil_div


def transfer(
    pieces: Iterable[Piece], on_bytes: Callable[[int], None], readers: int | None = None
) -> None:
    """Fills the targets of all pieces: a ``Transfer`` beside which nothing else is done."""
    with Transfer(pieces, on_bytes, readers=readers):
        pass


class Transfer:
    """Fills the targets of ``pieces``, in file order, beside the block of its ``with``, whose end
    waits for it.

    ``readers`` (None: by the machine) spans are read at once, into buffers of ``STAGING_BYTES``:
    for the CPU by as many threads, which also copy, for GPUs by one (``move_to_gpus``). Files are
    read, not mapped: one that shrinks meanwhile is an error and not a signal.

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
        ordered = [piece for piece in in_file_order(pieces) if piece.nbytes]
        self._missing: Counter[str] = Counter()
        devices: set[torch.device] = set()
        for piece in ordered:
            self._missing[piece.name] += piece.nbytes
            devices.update(share.target.device for share in piece.shares)
        self._devices = sorted((one for one in devices if one.type == "cuda"), key=str)
        total = self._missing.total()
        self._readers = min(readers or reader_count(), ceil_div(total, STAGING_BYTES))
        self._buffer_bytes = min(total + GAP * len(ordered), STAGING_BYTES)
        self._spans = spans(ordered, STAGING_BYTES)
        self._taking = Lock()
        self._on_bytes = on_bytes
        self._on_filled = on_filled
        self._changed = Condition()
        self._error: BaseException | None = None
        self._running = 0
        self._stopped = False

    def __enter__(self) -> Self:
        prepare(self._devices)
        jobs = [self._move] if self._devices else [self._read] * self._readers
        self._running = len(jobs)
        self._threads = ThreadPoolExecutor(max(1, len(jobs)), "dsv4-load")
        with ExitStack() as undo:
            undo.callback(self._end)
            for job in jobs:
                self._threads.submit(job).add_done_callback(self._on_end)
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
            self._stopped = True
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _end(self) -> None:
        self._stopped = True
        self._threads.shutdown()
        # Its traceback leads here, and would keep the targets until the garbage is collected.
        self._error = None

    # Targets that were made in inference mode can be written to only in inference mode, which is a
    # matter of the thread.
    @torch.inference_mode()
    def _read(self) -> None:
        memory = torch.empty(self._buffer_bytes, dtype=torch.uint8)
        view = memory.numpy().data
        taken = takewhile(lambda _: not self._stopped, iter(self._next_span, None))
        # Spans come in file order, and a process may have few files open.
        for path, of_file in groupby(taken, lambda span: span.file):
            with open_sequential(path) as file:
                for span in of_file:
                    _read_exactly(file, span.offset, view[: span.nbytes])
                    copy_on_host(span, memory)
                    self._arrived(span.pieces)

    @torch.inference_mode()
    @uncollected()
    def _move(self) -> None:
        move_to_gpus(
            iter(self._next_span, None),
            self._devices,
            self._buffer_bytes,
            self._readers,
            lambda span: self._arrived(span.pieces),
            lambda: self._stopped,
        )

    def _next_span(self) -> Span | None:
        with self._taking:
            return next(self._spans, None)

    def _arrived(self, pieces: Iterable[Piece]) -> None:
        arrived: defaultdict[str, int] = defaultdict(int)
        for piece in pieces:
            arrived[piece.name] += piece.nbytes
        self._on_bytes(sum(arrived.values()))
        for name, nbytes in arrived.items():
            with self._changed:
                self._missing[name] -= nbytes
                is_filled = not self._missing[name]
            if is_filled:
                self._on_filled(name)
                with self._changed:
                    del self._missing[name]
                    self._changed.notify_all()


def _read_exactly(file: FileIO, offset: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(file.fileno(), [memory[done:]], offset + done)
        except OSError as error:
            raise unreadable(file.name, error.errno or 0) from None
        if not count:
            raise too_short(Path(file.name), offset + len(memory))
        done += count
