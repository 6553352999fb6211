"""Rows of 32 values: the registers of a warp, and how instructions read and write them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

LANES = 32
ALL = np.ones(LANES, bool)
ALL.flags.writeable = False
Array = NDArray[Any]
# True instead of 32 times true.
Mask = Array | bool
# Type and number of a row.
Place = tuple[str, int]
Source = Callable[["Warp"], Array]
Target = Callable[["Warp", Array, Mask], None]

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **dict.fromkeys(("b8", "u8"), np.uint8),
    "s8": np.int8,
    **dict.fromkeys(("b16", "u16", "bf16", "e4m3x2", "e5m2x2", "ue8m0x2"), np.uint16),
    "s16": np.int16,
    "f16": np.float16,
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2", "u16x2", "s16x2"), np.uint32),
    "s32": np.int32,
    "f32": np.float32,
    **dict.fromkeys(("b64", "u64", "f32x2"), np.uint64),
    "s64": np.int64,
    "f64": np.float64,
    "e2m1x2": np.uint8,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Class of a register by the size of its type; predicates are a class of their own.
CLASS_DTYPES = {"pred": np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def lanes(mask: Mask) -> Array:
    """The mask as 32 booleans."""
    return mask if isinstance(mask, np.ndarray) else ALL


def register_class(ptx_type: str) -> str | int:
    """The class of registers that hold values of a PTX type."""
    return "pred" if ptx_type == "pred" else np.dtype(DTYPES[ptx_type]).itemsize


class Rows(dict[Place, Array]):
    """The rows of a warp as values of any PTX type, by type and number, all of the same memory.

    Each is made when it is asked for: most never are.
    """

    def __init__(self, classes: dict[str | int, Array]):
        super().__init__()
        self._classes = classes
        self._views: dict[str, Array] = {}

    def __missing__(self, place: Place) -> Array:
        ptx_type, row = place
        if ptx_type not in self._views:
            self._views[ptx_type] = self._classes[register_class(ptx_type)].view(DTYPES[ptx_type])
        self[place] = self._views[ptx_type][row]
        return self[place]


class Row:
    """Reads a row as it is: values that change with the register."""

    __slots__ = ("place",)

    def __init__(self, place: Place):
        self.place = place

    def __call__(self, warp: "Warp") -> Array:
        return warp.rows[self.place]


class RowStore:
    """Writes values of the row's own type."""

    __slots__ = ("place",)

    def __init__(self, place: Place):
        self.place = place

    def __call__(self, warp: "Warp", values: Array, mask: Mask) -> None:
        if mask is True:
            warp.rows[self.place][...] = values
        else:
            np.copyto(warp.rows[self.place], values, where=mask)


def resized(read: Source, ptx_type: str) -> Source:
    dtype = np.dtype(DTYPES[ptx_type])
    plain = UNSIGNED[dtype.itemsize]
    return lambda warp: read(warp).astype(plain).view(dtype)


def inverted(read: Source) -> Source:
    return lambda warp: ~read(warp)


def joined(reads: list[Source], ptx_type: str) -> Source:
    """One value of several, the first in the lowest bits."""
    dtype = np.dtype(DTYPES[ptx_type])

    def read(warp: "Warp") -> Array:
        parts = np.stack([part(warp) for part in reads], -1)
        return parts.view(dtype)[:, 0]

    return read


def split(writes: list[Target], size: int) -> Target:
    def write(warp: "Warp", values: Array, mask: Mask) -> None:
        parts = np.ascontiguousarray(values).view(UNSIGNED[size]).reshape(LANES, -1)
        for n, part in enumerate(writes):
            part(warp, parts[:, n], mask)

    return write


def resized_store(ptx_type: str, row: int) -> Target:
    write = RowStore((ptx_type, row))
    dtype = DTYPES[ptx_type]
    return lambda warp, values, mask: write(warp, values.astype(dtype), mask)


def drop(warp: "Warp", values: Array, mask: Mask) -> None:
    """A result that no register takes."""
