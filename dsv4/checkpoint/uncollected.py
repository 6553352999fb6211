"""Work that makes hundreds of thousands of objects, without Python's collector of cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing looks for cycles meanwhile: the names of a large checkpoint are gone through again
    and again otherwise, which takes longer than what is done with them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
