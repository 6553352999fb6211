"""Descriptors of matrices in shared memory, as wgmma and tcgen05 read them."""

from dataclasses import dataclass

import numpy as np

from tests.ptx.faults import BadDescriptor
from tests.ptx.memory import SharedMemory
from tests.ptx.rows import Array
from tests.ptx.tensor_map import swizzled

# Swizzle modes of the instructions: bytes of a row of the pattern, and address bits exchanged.
_WGMMA_MODES = {1: (128, 3), 2: (64, 2), 3: (32, 1)}
_TCGEN05_MODES = {0: (16, 0), 2: (128, 3), 4: (64, 2), 6: (32, 1)}


@dataclass(frozen=True)
class SharedMatrix:
    """A K-major matrix: groups of eight rows, ``stride`` bytes from one to the next.

    ``width`` is the number of bytes from one row of a group to the next; ``leading``, of a matrix
    with contiguous columns, from one block of so many bytes of every row to the next block.
    """

    start: int
    stride: int
    width: int
    swizzle: int
    leading: int = 0

    @classmethod
    def of_wgmma(cls, bits: int) -> "SharedMatrix":
        """A descriptor of wgmma."""
        mode = bits >> 62 & 3
        if bits >> 49 & 7 or mode not in _WGMMA_MODES:
            raise BadDescriptor(f"wgmma descriptor {bits:#x}")
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, stride, *_WGMMA_MODES[mode], leading)

    @classmethod
    def of_tcgen05(cls, bits: int) -> "SharedMatrix":
        """A descriptor of tcgen05.mma and tcgen05.cp."""
        mode = bits >> 61 & 7
        if bits >> 46 & 7 != 1 or bits >> 49 & 7 or mode not in _TCGEN05_MODES:
            raise BadDescriptor(f"tcgen05 descriptor {bits:#x}")
        return cls((bits & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, *_TCGEN05_MODES[mode])

    def rows(self, memory: SharedMemory, count: int, size: int, what: str) -> Array:
        """uint8 ``[count, size]``: the first bytes of the first rows."""
        if size > self.width:
            raise BadDescriptor(f"{what}: {size} bytes of a row of {self.width}")
        row = np.arange(count)[:, None]
        at = self.start + row // 8 * self.stride + row % 8 * self.width + np.arange(size)
        return memory.read_by_proxy(swizzled(at, self.swizzle), what)

    def across(self, memory: SharedMemory, count: int, size: int, what: str) -> Array:
        """uint8 ``[count, size]``: whole rows, a block of ``width`` bytes after the other."""
        row, byte = np.arange(count)[:, None], np.arange(size)
        at = self.start + row // 8 * self.stride + row % 8 * self.width + byte % self.width
        at = at + byte // self.width * self.leading
        return memory.read_by_proxy(swizzled(at, self.swizzle), what)
