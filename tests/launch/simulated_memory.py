"""Whether a layout can hold what a recording does, by acting it out on a map of memory."""

import numpy as np
from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.recording import Recording
from dsv4.launch.workspace import ALIGNMENT, Layout


def assert_buffers_survive(recording: Recording, layout: Layout) -> None:
    """Acts out the items in order: a buffer is written where it is named first, and must be what it
    was wherever it is named later and, if it is kept, at the end. Placed buffers are elsewhere.
    """

    def is_here(tensor: Tensor) -> bool:
        return recording.owns(tensor) and storage_key(tensor) not in recording.placed

    sizes = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for item in recording.items
        for tensor in item.tensors
        if is_here(tensor)
    }
    for key, nbytes in sizes.items():
        assert layout.offsets[key] % ALIGNMENT == 0
        assert 0 <= layout.offsets[key] <= layout.nbytes - nbytes
    memory = np.zeros(layout.nbytes // ALIGNMENT, dtype=np.int64)
    places = {key: _place(layout.offsets[key], nbytes) for key, nbytes in sizes.items()}
    # 0 is memory that nothing has written.
    names = {key: name for name, key in enumerate(sizes, 1)}
    written: set[int] = set()

    def expect_intact(key: int) -> None:
        assert (memory[places[key]] == names[key]).all()

    for item in recording.items:
        named = [storage_key(tensor) for tensor in item.tensors if is_here(tensor)]
        for key in written.intersection(named):
            expect_intact(key)
        for key in named:
            if key not in written:
                memory[places[key]] = names[key]
                written.add(key)
        # The buffers of one item must not lie in each other either.
        for key in named:
            expect_intact(key)
    for tensor in recording.kept:
        if storage_key(tensor) in written:
            expect_intact(storage_key(tensor))


def _place(offset: int, nbytes: int) -> slice:
    """The blocks of a buffer; one without a byte has one."""
    last = offset + max(nbytes, 1) - 1
    return slice(offset // ALIGNMENT, last // ALIGNMENT + 1)
