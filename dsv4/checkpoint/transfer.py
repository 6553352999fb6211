"""Moves bytes of files to the devices that own them: a thread per device, in file order, copying
beside the reading.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import FileIO
from itertools import cycle, groupby
from pathlib import Path
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.errors import UserError

STAGING_BYTES = 64 << 20


class Piece(NamedTuple):
    """Bytes of ``file`` from ``offset`` on, and where they go: ``target``, contiguous uint8
    ``[bytes]``.
    """

    file: Path
    offset: int
    target: Tensor


def transfer(
    pieces: Mapping[torch.device, Iterable[Piece]], on_bytes: Callable[[int], None]
) -> None:
    """Fills the targets of each device; its thread calls ``on_bytes`` with the number of bytes that
    have arrived.

    Files are read, not mapped: a file that shrinks meanwhile is an error and not a signal. For CUDA
    devices the bytes pass two pinned buffers of ``STAGING_BYTES``, which torch gets back at the
    end. The first error of any thread, or Ctrl-C, ends the others within one buffer and is raised.
    ``UserError`` for a file that cannot be read or is too short.
    """
    stop = Event()
    with ThreadPoolExecutor(max(len(pieces), 1), "dsv4-load") as threads:
        try:
            running = [
                threads.submit(_fill, device, part, on_bytes, stop)
                for device, part in pieces.items()
            ]
            for finished in as_completed(running):
                finished.result()
        finally:
            stop.set()


# Targets that were made in inference mode can be written to only in inference mode, which is a
# matter of the thread.
@torch.inference_mode()
def _fill(
    device: torch.device, pieces: Iterable[Piece], on_bytes: Callable[[int], None], stop: Event
) -> None:
    memory = _PinnedStaging(device) if device.type == "cuda" else _Direct()
    try:
        for count in _filled_batches(memory, pieces):
            on_bytes(count)
            if stop.is_set():
                return
    finally:
        memory.finish()


def _filled_batches(memory: "_Direct | _PinnedStaging", pieces: Iterable[Piece]) -> Iterator[int]:
    """Fills the pieces file by file; yields the bytes of every batch."""
    for file, part in groupby(in_file_order(pieces), key=lambda piece: piece.file):
        try:
            with file.open("rb", buffering=0) as opened:
                if sys.platform == "linux":  # Reads further ahead.
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                for batch in batches(part):
                    memory.fill(opened, batch)
                    yield sum(piece.target.numel() for piece in batch)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces as a disk likes to read them."""
    return sorted(pieces, key=lambda piece: (str(piece.file), piece.offset))


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces, cut where one is larger than ``STAGING_BYTES``, in lists that together are at
    most as large.
    """
    batch = []
    total = 0
    for file, offset, target in pieces:
        for start in range(0, target.numel(), STAGING_BYTES):
            part = target[start : start + STAGING_BYTES]
            if total + part.numel() > STAGING_BYTES:
                yield batch
                batch = []
                total = 0
            batch.append(Piece(file, offset + start, part))
            total += part.numel()
    if batch:
        yield batch


class _Direct:
    """Memory that the operating system can read into."""

    def fill(self, file: FileIO, batch: list[Piece]) -> None:
        for piece in batch:
            _read_exactly(file, piece.offset, piece.target)

    def finish(self) -> None:
        """Nothing is left to wait for."""


class _PinnedStaging:
    """Two pinned buffers that take turns: a file fills one while ``device`` copies the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Earlier work on the memory of the targets may still be running.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turns = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def fill(self, file: FileIO, batch: list[Piece]) -> None:
        buffer, copied = next(self._turns)
        copied.synchronize()
        used = 0
        with torch.cuda.stream(self._stream):
            for piece in batch:
                read = buffer[used : used + piece.target.numel()]
                _read_exactly(file, piece.offset, read)
                piece.target.copy_(read, non_blocking=True)
                used += read.numel()
            copied.record()

    def finish(self) -> None:
        self._stream.synchronize()


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
