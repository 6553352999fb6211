"""Bytes that several threads move, counted for one progress bar."""

from collections.abc import Callable
from threading import Lock

from dsv4.progress import Progress


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """What threads call with the bytes that each has moved. ``progress(done, total)`` is told of
    their sum, by one thread at a time.
    """
    lock = Lock()
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)

    return count
