"""Reads of files that go on beside the interpreter: the asynchronous I/O of POSIX, by threads of
the C library. Threads of Python need the interpreter between two reads, and where sixteen of them
want it, and one that queues copies, they wait for it longer than a read takes.
"""

import ctypes
import errno
import os
import sys
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import Tensor

from dsv4.errors import UserError

_NO_SIGNAL = 1


class _Request(ctypes.Structure):
    """``struct aiocb`` of glibc, which is that of every system PyTorch has CUDA for."""

    _fields_ = [
        ("descriptor", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("attributes", ctypes.c_char * 48),
        ("own", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    ]


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Read(NamedTuple):
    """What a slot reads: ``memory``, all of it, from ``offset`` of its file on."""

    memory: Tensor
    offset: int


class BackgroundReads:
    """Up to ``slots`` reads at once, by the threads of the C library, of which there are at most
    20. The end of its ``with`` waits for all of them, because they write into memory.
    """

    def __init__(self, slots: int) -> None:
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        self._library.aio_return.restype = ctypes.c_ssize_t
        self._requests = [_Request(notify=_NO_SIGNAL) for _ in range(slots)]
        # Of the reads that are running; null for other slots.
        self._awaited = (ctypes.POINTER(_Request) * slots)()
        self._reads: dict[int, _Read] = {}
        # One for every slot: the library reads a descriptor by one thread.
        self._files: dict[int, tuple[Path, FileIO]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        for slot in self._reads:
            while self._error(slot) == errno.EINPROGRESS:
                self._wait(None)
            self._awaited[slot] = None
        for _path, file in self._files.values():
            file.close()

    def __len__(self) -> int:
        """How many are running."""
        return len(self._reads)

    def begin(self, slot: int, path: Path, offset: int, memory: Tensor) -> None:
        """Begins to fill ``memory``, contiguous uint8 ``[bytes]``, from ``offset`` of a file on.
        ``slot``: that of no running read. Raises ``UserError`` for a file that cannot be read.
        """
        before, file = self._files.get(slot, (None, None))
        if before != path:
            self._files[slot] = path, open_sequential(path)
            if file is not None:
                file.close()
        self._reads[slot] = _Read(memory, offset)
        self._submit(slot, 0)

    def finished(self, seconds: float) -> list[int]:
        """The slots that were filled since this was last asked; waits for the first one, but not
        much longer than ``seconds``. Raises ``UserError`` for what cannot be read and for a file
        that is too short.
        """
        self._wait(seconds)
        return [slot for slot in list(self._reads) if self._is_filled(slot)]

    def _submit(self, slot: int, done: int) -> None:
        request = self._requests[slot]
        memory, offset = self._reads[slot]
        path, file = self._files[slot]
        request.descriptor = file.fileno()
        request.address = memory.data_ptr() + done
        request.nbytes = memory.numel() - done
        request.offset = offset + done
        self._awaited[slot] = ctypes.pointer(request)
        if self._library.aio_read(ctypes.byref(request)):
            self._forget(slot)
            raise unreadable(path, ctypes.get_errno())

    def _is_filled(self, slot: int) -> bool:
        error = self._error(slot)
        if error == errno.EINPROGRESS:
            return False
        request = self._requests[slot]
        count = self._library.aio_return(ctypes.byref(request))
        memory, offset = self._reads[slot]
        if 0 < count < request.nbytes:
            self._submit(slot, request.offset - offset + count)
            return False
        path, _ = self._files[slot]
        self._forget(slot)
        if error:
            raise unreadable(path, error)
        if not count:
            raise too_short(path, offset + memory.numel())
        return True

    def _forget(self, slot: int) -> None:
        self._awaited[slot] = None
        del self._reads[slot]

    def _error(self, slot: int) -> int:
        return self._library.aio_error(ctypes.byref(self._requests[slot]))

    def _wait(self, seconds: float | None) -> None:
        """Returns when one has ended, or there is none."""
        limit = None
        if seconds is not None:
            limit = ctypes.byref(_Time(int(seconds), int(seconds % 1 * 1e9)))
        if self._reads:
            self._library.aio_suspend(self._awaited, len(self._requests), limit)


def open_sequential(path: Path) -> FileIO:
    """A file that is read from its beginning to its end. Raises ``UserError``."""
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise unreadable(path, error.errno or 0) from None
    if sys.platform == "linux":  # Reads further ahead.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def unreadable(path: object, error: int) -> UserError:
    """``error``: a number of the operating system."""
    return UserError(f"{path}: cannot be read ({os.strerror(error)})")


def too_short(path: Path, expected: int) -> UserError:
    """A file that ends before byte ``expected``, which is to be read."""
    found = path.stat().st_size
    return UserError(f"{path}: truncated: found {found} bytes, expected at least {expected}")
