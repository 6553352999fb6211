"""Moves bytes of files to the devices that own them: readers that take a part of the files each, in
file order, copying beside the reading.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import FileIO
from itertools import cycle, groupby
from threading import Event

import torch
from torch import Tensor

from dsv4.checkpoint.pieces import Piece, Share, batches, equal_parts, in_file_order
from dsv4.errors import UserError

STAGING_BYTES = 64 << 20


def transfer(pieces: Iterable[Piece], on_bytes: Callable[[int], None], readers: int = 1) -> None:
    """Fills the targets of all pieces. ``readers`` threads share the files between them and serve
    all devices; each calls ``on_bytes`` with the number of bytes that have been read.

    Files are read, not mapped: a file that shrinks meanwhile is an error and not a signal. For CUDA
    devices the bytes pass two pinned buffers of ``STAGING_BYTES`` a reader, which torch gets back
    at the end. The first error of any thread, or Ctrl-C, ends the others within one buffer and is
    raised. ``UserError`` for a file that cannot be read or is too short.
    """
    stop = Event()
    with ThreadPoolExecutor(readers, "dsv4-load") as threads:
        try:
            running = [
                threads.submit(_fill, part, on_bytes, stop)
                for part in equal_parts(in_file_order(pieces), readers)
            ]
            for finished in as_completed(running):
                finished.result()
        finally:
            stop.set()


# Targets that were made in inference mode can be written to only in inference mode, which is a
# matter of the thread.
@torch.inference_mode()
def _fill(pieces: list[Piece], on_bytes: Callable[[int], None], stop: Event) -> None:
    on_cuda = any(share.memory.is_cuda for piece in pieces for share in piece.shares)
    memory = _PinnedStaging() if on_cuda else _Direct()
    try:
        for count in _filled_batches(memory, pieces):
            on_bytes(count)
            if stop.is_set():
                return
    finally:
        memory.finish()


def _filled_batches(memory: "_Direct | _PinnedStaging", pieces: list[Piece]) -> Iterator[int]:
    """Fills the pieces file by file; yields the bytes of every batch."""
    for file, part in groupby(pieces, key=lambda piece: piece.file):
        try:
            with file.open("rb", buffering=0) as opened:
                if sys.platform == "linux":  # Reads further ahead.
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                for batch in batches(part, STAGING_BYTES):
                    memory.fill(opened, batch)
                    yield sum(piece.nbytes for piece in batch)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None


class _Direct:
    """Memory that the operating system can read into."""

    def fill(self, file: FileIO, batch: list[Piece]) -> None:
        for piece in batch:
            targets = piece.targets()
            if len(targets) == 1 and targets[0][1].numel() == piece.nbytes:
                _read_exactly(file, piece.offset, targets[0][1])
                continue
            read = torch.empty(piece.nbytes, dtype=torch.uint8)
            _read_exactly(file, piece.offset, read)
            for share, target in targets:
                _copy_columns(share, target, read.view(piece.rows, piece.width))

    def finish(self) -> None:
        """Nothing is left to wait for."""


class _PinnedStaging:
    """Two pinned buffers that take turns: a file fills one while devices copy the other."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._unsorted: dict[torch.device, Tensor] = {}
        buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied: list[dict[torch.device, torch.cuda.Event]] = [{}, {}]
        self._turns = cycle(list(zip(buffers, copied, strict=True)))

    def fill(self, file: FileIO, batch: list[Piece]) -> None:
        buffer, copied = next(self._turns)
        for event in copied.values():
            event.synchronize()
        copies: defaultdict[torch.device, list[tuple[Share, Tensor, Tensor]]] = defaultdict(list)
        used = 0
        for piece in batch:
            read = buffer[used : used + piece.nbytes]
            _read_exactly(file, piece.offset, read)
            rows = read.view(piece.rows, piece.width)
            for share, target in piece.targets():
                copies[target.device].append((share, target, rows))
            used += piece.nbytes
        for device, own in copies.items():
            with torch.cuda.stream(self._stream(device)):
                for copy in own:
                    self._copy(*copy)
                copied.setdefault(device, torch.cuda.Event()).record()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            # Earlier work on the memory of the targets may still be running.
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def _copy(self, share: Share, target: Tensor, read: Tensor) -> None:
        """Queues a share. Of columns the whole rows cross: torch would pick them on the host."""
        rows, width = read.shape
        if rows > 1 and share.stop - share.first < width:
            if target.device not in self._unsorted:
                self._unsorted[target.device] = target.new_empty(STAGING_BYTES)
            arrived = self._unsorted[target.device][: read.numel()].view(rows, width)
            arrived.copy_(read, non_blocking=True)
            read = arrived
        _copy_columns(share, target, read)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _copy_columns(share: Share, target: Tensor, read: Tensor) -> None:
    """A share of the rows ``read``, uint8 ``[rows, width]``, to its target."""
    columns = read[:, share.first : share.stop]
    target.view(columns.shape).copy_(columns, non_blocking=True)


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
