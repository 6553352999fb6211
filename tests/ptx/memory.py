"""Global memory made of registered tensors, and the shared memory of a block."""

import ctypes
from typing import NamedTuple

import numpy as np

from tests.ptx.faults import MissingFence, OutOfBounds
from tests.ptx.rows import Array

_OFFSETS = {size: np.arange(size) for size in (1, 2, 4, 8, 16)}
# Words of a size, and the power of two that it is.
_WORDS = {1 << n: (np.dtype(f"V{1 << n}"), n) for n in range(6)}


def bytes_at(first: Array, size: int) -> Array:
    """Indices ``[n, size]`` of the bytes from each of n places on."""
    return first[:, None] + _OFFSETS[size]


class Words:
    """Bytes that are read and written as words of 1 to 32 bytes, each at a multiple of its size."""

    def __init__(self, content: Array):
        self.content = content
        self._views: dict[int, Array] = {}

    def _view(self, size: int) -> Array:
        if size not in self._views:
            whole = self.content.size // size * size
            self._views[size] = self.content[:whole].view(_WORDS[size][0])
        return self._views[size]

    def read(self, first: Array, size: int) -> Array:
        """uint8 ``[n, size]``: the words that begin at n bytes."""
        return self._view(size)[first >> _WORDS[size][1]].view(np.uint8).reshape(-1, size)

    def write(self, first: Array, values: Array) -> None:
        """Writes uint8 ``[n, size]`` to words that begin at n bytes."""
        word, shift = _WORDS[values.shape[1]]
        words = np.ascontiguousarray(values).view(word)[:, 0]
        self._view(word.itemsize)[first >> shift] = words


class _Tensor(NamedTuple):
    name: str
    start: int
    end: int
    content: Array
    words: Words


class GlobalMemory:
    """Only bytes of registered tensors may be touched."""

    def __init__(self) -> None:
        self._tensors: list[_Tensor] = []

    def register(self, name: str, address: int, size: int) -> None:
        """Makes ``size`` bytes at an address of this process accessible."""
        if size:
            content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self._tensors.append(_Tensor(name, address, address + size, content, Words(content)))

    def _tensor(self, address: int, size: int, what: object) -> _Tensor:
        for tensor in self._tensors:
            if tensor.start <= address and address + size <= tensor.end:
                return tensor
        near = min(
            self._tensors,
            key=lambda tensor: max(tensor.start - address, address - tensor.end),
            default=None,
        )
        where = f"; {address - near.start} from the start of {near.name}" if near else ""
        raise OutOfBounds(f"{what} of {size} bytes at {address:#x} outside every tensor{where}")

    def view(self, address: int, size: int, what: object) -> Array:
        """The bytes at an address, to be read or written."""
        tensor = self._tensor(address, size, what)
        return tensor.content[address - tensor.start : address - tensor.start + size]

    def gather(self, addresses: Array, size: int, what: object) -> Array:
        """uint8 ``[n, size]``: the bytes at n addresses."""
        if together := self._together(addresses, size):
            words, first = together
            return words.read(first, size)
        return np.stack([self.view(address, size, what) for address in addresses.tolist()])

    def scatter(self, addresses: Array, values: Array, what: object) -> None:
        """Writes uint8 ``[n, size]`` to n addresses, in their order."""
        size = values.shape[1]
        if together := self._together(addresses, size):
            words, first = together
            words.write(first, values)
            return
        for address, value in zip(addresses.tolist(), values, strict=True):
            self.view(address, size, what)[:] = value

    def _together(self, addresses: Array, size: int) -> tuple[Words, Array] | None:
        """The words of the tensor that all addresses are in, and where in it these are.

        None where there is no such tensor, or where its words lie across those of the memory.
        """
        low = int(np.minimum.reduce(addresses))
        end = int(np.maximum.reduce(addresses)) + size
        for tensor in self._tensors:
            if tensor.start <= low and end <= tensor.end:
                if tensor.start % size:
                    return None
                return tensor.words, (addresses - np.uint64(tensor.start)).astype(np.int64)
        return None

    def spread(self, start: int, offsets: Array, what: object) -> tuple[Array, Array]:
        """A tensor's content and the indices of the bytes ``start + offsets``."""
        low = start + int(offsets.min())
        tensor = self._tensor(low, int(offsets.max()) - int(offsets.min()) + 1, what)
        return tensor.content, offsets + (start - tensor.start)


# In place of a warp, which are far fewer.
_ANNOUNCED = 255


class SharedMemory:
    """A block's shared memory, poisoned, with what the asynchronous proxy does not see yet."""

    def __init__(self, size: int):
        self.content = np.full(size, 0xFF, np.uint8)
        self._words = Words(self.content)
        # 1 + the warp that wrote a byte and has not executed fence.proxy.async since, or
        # _ANNOUNCED: an mbarrier has told of it, and the fence of whoever waits there will do. The
        # machine does not ask who waited.
        self.unfenced = np.zeros(size, np.uint8)
        self._unfenced_words = Words(self.unfenced)
        self.unfenced_count = 0

    def reset(self) -> None:
        """As at the start of a block."""
        self.content[:] = 0xFF
        self.unfenced[:] = 0
        self.unfenced_count = 0

    def check(self, low: int, high: int, what: object) -> None:
        """Refuses bytes outside."""
        if low < 0 or high > self.content.size:
            raise OutOfBounds(f"{what}: shared memory {low} to {high} of {self.content.size} bytes")

    def read(self, first: Array, size: int) -> Array:
        """uint8 ``[n, size]``: what threads read at n addresses, multiples of the size."""
        return self._words.read(first, size)

    def write(self, first: Array, values: Array, warp: int) -> None:
        """Writes uint8 ``[n, size]``; the asynchronous proxy sees it only after a fence."""
        self._words.write(first, values)
        self._unfenced_words.write(first, np.full(values.shape, warp + 1, np.uint8))
        self.unfenced_count += 1

    def announce(self, first: Array, size: int, warp: int) -> None:
        """An mbarrier tells of words that a warp's copies wrote."""
        at = bytes_at(first, size)
        own = at[self.unfenced[at] == warp + 1]
        self.unfenced[own] = _ANNOUNCED

    def fence(self, warp: int) -> None:
        """A warp's writes so far, and those announced, become visible to the asynchronous proxy."""
        if self.unfenced_count:
            self.unfenced[(self.unfenced == warp + 1) | (self.unfenced == _ANNOUNCED)] = 0
            self.unfenced_count = int(self.unfenced.any())

    def read_by_proxy(self, at: Array, what: object) -> Array:
        """Bytes that the asynchronous proxy reads."""
        if at.size:
            self.check(int(at.min()), int(at.max()) + 1, what)
        if self.unfenced_count and self.unfenced[at].any():
            warp = int(self.unfenced[at].max()) - 1
            raise MissingFence(f"{what} reads what warp {warp} wrote without fence.proxy.async")
        return self.content[at]

    def write_by_proxy(self, at: Array, values: Array, what: object) -> None:
        """Bytes that the asynchronous proxy writes."""
        self.check(int(at.min()), int(at.max()) + 1, what)
        self.content[at] = values
        if self.unfenced_count:
            self.unfenced[at] = 0
