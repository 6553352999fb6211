"""The 128 bytes of a CUtensorMap, decoded, and the boxes that TMA moves with it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.ptx.faults import BadDescriptor
from tests.ptx.memory import GlobalMemory
from tests.ptx.rows import Array


class Element(NamedTuple):
    """Bits of an element in memory, and bytes of shared memory per 8 bytes read."""

    name: str
    bits: int
    spread: int = 1


ELEMENTS = {
    0: Element("uint8", 8),
    1: Element("uint16", 16),
    2: Element("uint32", 32),
    3: Element("int32", 32),
    4: Element("uint64", 64),
    5: Element("int64", 64),
    6: Element("float16", 16),
    7: Element("float32", 32),
    8: Element("float32 flushed", 32),
    9: Element("float64", 64),
    10: Element("bfloat16", 16),
    11: Element("16 4-bit packed", 4),
    12: Element("16 4-bit in 16 bytes", 4, 2),
}


@dataclass(frozen=True)
class TensorMap:
    """What the encoded descriptor says; sizes and boxes in elements, the first one contiguous.

    ``strides`` are the bytes from one element to the next of every further dimension, ``swizzle``
    the number of address bits (4 up to 6) that are exchanged, 0 for none.
    """

    address: int
    element: Element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @classmethod
    def decode(cls, raw: bytes) -> "TensorMap":
        """Reads the first 64 of a descriptor's 128 bytes; the rest is zero."""
        words = struct.unpack_from("<16I", raw)
        flags = words[2]
        rank = (flags >> 4 & 7) + 1
        kind = flags >> 7 & 15
        if kind not in ELEMENTS or flags >> 11 & 3 or flags >> 13 & 7 > 3:
            raise BadDescriptor(f"tensor map of elements {kind} with flags {flags:#x}")
        strides = [_stride(words, n) for n in range(rank - 1)]
        return cls(
            words[0] | words[1] << 32,
            ELEMENTS[kind],
            tuple(words[8 + n] + 1 for n in range(rank)),
            tuple(strides),
            tuple(raw[55 + n] + 1 for n in range(rank)),
            flags >> 13 & 7,
        )

    def encode(self) -> bytes:
        """A descriptor that says the same."""
        words = [0] * 32
        words[0] = self.address & 0xFFFFFFFF
        words[1] = self.address >> 32
        kind = next(code for code, element in ELEMENTS.items() if element == self.element)
        words[2] = 2 | len(self.sizes) - 1 << 4 | kind << 7 | self.swizzle << 13
        for n, stride in enumerate(self.strides):
            words[3 + n] = stride // 16 & 0xFFFFFFFF
            words[7] |= (stride // 16 >> 32) << 4 * n
        for n, size in enumerate(self.sizes):
            words[8 + n] = size - 1
        raw = bytearray(struct.pack("<32I", *words))
        for n, size in enumerate(self.box):
            raw[55 + n] = size - 1
        return bytes(raw)

    @property
    def row_bytes(self) -> int:
        """Bytes of memory of a box's contiguous row."""
        return self.box[0] * self.element.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of shared memory of a box."""
        return self.row_bytes * self.element.spread * int(np.prod(self.box[1:]))

    def load(self, corner: tuple[int, ...], memory: GlobalMemory) -> Array:
        """uint8 ``[box_bytes]``: a box; what lies outside the tensor is zero."""
        rows = [self._row(corner[0], outer, memory) for outer in self._outer(corner)]
        return self._spread(np.stack(rows))

    def gather(self, corner: int, rows: list[int], memory: GlobalMemory) -> Array:
        """uint8: the given rows of a tensor of two dimensions, one below the other."""
        if len(self.sizes) != 2 or self.box[1] != 1:
            raise BadDescriptor("gather4 needs a tensor of two dimensions and boxes of one row")
        return self._spread(np.stack([self._row(corner, (row,), memory) for row in rows]))

    def store(self, corner: tuple[int, ...], memory: GlobalMemory, data: Array) -> None:
        """Writes a box; what lies outside the tensor is left out."""
        if self.element.spread != 1:
            raise BadDescriptor(f"store of {self.element.name}")
        rows = data.reshape(-1, self.row_bytes)
        for outer, row in zip(self._outer(corner), rows, strict=True):
            place = self._place(corner[0], outer)
            if place is not None:
                address, skip, count = place
                memory.view(address, count, "TMA store")[:] = row[skip : skip + count]

    def _outer(self, corner: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Coordinates of a box's rows behind the first, in the order of shared memory."""
        for index in np.ndindex(*self.box[:0:-1]):
            yield tuple(c + i for c, i in zip(corner[1:], index[::-1], strict=True))

    def _place(self, column: int, outer: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(address, bytes of the box row before it, bytes) of what lies inside the tensor."""
        if any(not 0 <= c < size for c, size in zip(outer, self.sizes[1:], strict=True)):
            return None
        start = max(column, 0)
        end = min(column + self.box[0], self.sizes[0])
        if start >= end:
            return None
        bits = self.element.bits
        if (start * bits) % 8 or (end * bits) % 8:
            raise BadDescriptor(f"column {column} of a tensor map inside a byte")
        offset = sum(c * stride for c, stride in zip(outer, self.strides, strict=True))
        address = self.address + offset + start * bits // 8
        return address, (start - column) * bits // 8, (end - start) * bits // 8

    def _row(self, column: int, outer: tuple[int, ...], memory: GlobalMemory) -> Array:
        row = np.zeros(self.row_bytes, np.uint8)
        place = self._place(column, outer)
        if place is not None:
            address, skip, count = place
            row[skip : skip + count] = memory.view(address, count, "TMA load")
        return row

    def _spread(self, rows: Array) -> Array:
        """Every 16 4-bit codes take 16 bytes of shared memory, the upper 8 of them unused."""
        if self.element.spread == 1:
            return rows.reshape(-1)
        codes = rows.reshape(-1, 8)
        return np.concatenate((codes, np.full_like(codes, 0xFF)), 1).reshape(-1)

    def places(self, start: int, size: int) -> Array:
        """Where the bytes of a box lie in shared memory that starts at an address."""
        return swizzled(start + np.arange(size), self.swizzle)


def swizzled(at: Array, bits: int) -> Array:
    """Addresses with the 16-byte units of a 128-byte row exchanged by the row's number."""
    return at ^ ((at >> 7 & (1 << bits) - 1) << 4) if bits else at


def _stride(words: tuple[int, ...], dimension: int) -> int:
    """Bytes: 32 bits in units of 16, and four more in a word that all strides share."""
    high = words[7] >> 4 * dimension & 15
    return (words[3 + dimension] | high << 32) * 16
