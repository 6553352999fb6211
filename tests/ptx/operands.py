"""Registers of a warp, and what an instruction's operands are to it.

A warp keeps every virtual register as a row of 32 lanes. Constants, special registers and addresses
of variables are rows as well, so that an instruction reads all of its operands alike.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.faults import Unsupported
from tests.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Negated,
    Nothing,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    TensorAddress,
    Vector,
)

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

LANES = 32
ALL = np.ones(LANES, bool)
ALL.flags.writeable = False
PARAMETERS = 1 << 40
"""The address of the first kernel parameter."""
LOCAL = 1 << 42
"""The address of every thread's first local variable."""
SHARED = 1 << 44
"""The generic address of shared memory's address 0."""
SHARED_START = 1024
"""Shared memory below this address belongs to the system."""

Array = NDArray[Any]
# True instead of 32 times true.
Mask = Array | bool
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
_CLASS_DTYPES = {"pred": np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def lanes(mask: Mask) -> Array:
    """The mask as 32 booleans."""
    return mask if isinstance(mask, np.ndarray) else ALL


def register_class(ptx_type: str) -> str | int:
    """The class of registers that hold values of a PTX type."""
    return "pred" if ptx_type == "pred" else np.dtype(DTYPES[ptx_type]).itemsize


class Rows(dict[tuple[str, int], Array]):
    """The rows of a warp as values of any PTX type, by type and number, all of the same memory.

    Each is made when it is asked for: most never are.
    """

    def __init__(self, classes: dict[str | int, Array]):
        super().__init__()
        self._classes = classes
        self._views: dict[str, Array] = {}

    def __missing__(self, place: tuple[str, int]) -> Array:
        ptx_type, row = place
        if ptx_type not in self._views:
            self._views[ptx_type] = self._classes[register_class(ptx_type)].view(DTYPES[ptx_type])
        self[place] = self._views[ptx_type][row]
        return self[place]


class Layout:
    """Which row each register, constant and special register of a function has."""

    def __init__(self, function: Function):
        self.function = function
        self.places: dict[Any, tuple[str | int, int]] = {}
        self.counts: dict[str | int, int] = dict.fromkeys(_CLASS_DTYPES, 0)
        self.constants: list[tuple[str | int, int, int]] = []
        self.specials: list[tuple[str, int]] = []
        # Type, row and address within a block of shared variables.
        self.shared_addresses: list[tuple[str, int, int]] = []
        for name, ptx_type in function.registers.items():
            self._place(Register(name), register_class(ptx_type))
        self.addresses: dict[str, int] = {}
        offset = 0
        self.parameters: dict[str, int] = {}
        for name, size in function.parameters:
            offset = -(-offset // 128) * 128
            self.parameters[name] = offset
            self.addresses[name] = PARAMETERS + offset
            offset += size
        self.shared_bytes = self._place_variables("shared", SHARED_START)
        self.local_bytes = self._place_variables("local", LOCAL) - LOCAL

    def _place_variables(self, space: str, at: int) -> int:
        """Gives those of a space addresses from ``at`` on; returns where they end."""
        variables = [v for v in self.function.variables if v.space == space]
        # Those without a size are last: the launch decides about it.
        for variable in sorted(variables, key=lambda variable: variable.size == 0):
            at = -(-at // variable.align) * variable.align
            self.addresses[variable.name] = at
            at += variable.size
        return at

    def _place(self, key: Any, kind: str | int) -> tuple[str | int, int]:
        place = (kind, self.counts[kind])
        self.places[key] = place
        self.counts[kind] += 1
        return place

    def classes(self) -> dict[str | int, Array]:
        """Rows of a warp before it starts: poison, and the constants."""
        found = {kind: np.empty((n, LANES), _CLASS_DTYPES[kind]) for kind, n in self.counts.items()}
        for kind, rows in found.items():
            rows.view(np.uint8)[:] = 1 if kind == "pred" else 0xFF
        for kind, row, bits in self.constants:
            found[kind][row] = bits
        return found

    def _constant(self, bits: int, kind: str | int) -> int:
        value = bits & 1 if kind == "pred" else bits & (1 << 8 * int(kind)) - 1
        if kind == "pred":
            value = int(bits != 0)
        key = (kind, value, "constant")
        if key not in self.places:
            self.constants.append((*self._place(key, kind), value))
        return self.places[key][1]

    def row(self, operand: Operand, ptx_type: str) -> Source:
        """The row of a register, to be written in place; its class must be that of the type."""
        if not isinstance(operand, Register) or self.places[operand][0] != register_class(ptx_type):
            raise Unsupported(f"{operand} as {ptx_type}")
        return _row(ptx_type, self.places[operand][1])

    def source(self, operand: Operand, ptx_type: str) -> Source:
        """Reads an operand as values of a type.

        Of a wider register the low bits, of a narrower one zero-extended ones.
        """
        if isinstance(operand, Register):
            kind, row = self.places[operand]
            if kind == register_class(ptx_type):
                return _row(ptx_type, row)
            return _resized(_row("pred" if kind == "pred" else f"u{8 * int(kind)}", row), ptx_type)
        if isinstance(operand, Immediate):
            return _row(ptx_type, self._constant(operand.bits, register_class(ptx_type)))
        if isinstance(operand, Symbol):
            return _row(ptx_type, self._address_row(operand, register_class(ptx_type)))
        if isinstance(operand, Special):
            return self._special(operand, ptx_type)
        if isinstance(operand, Negated):
            return _not(self.source(operand.register, "pred"))
        if isinstance(operand, Vector):
            part = np.dtype(DTYPES[ptx_type]).itemsize // len(operand.items)
            return _joined([self.source(item, f"b{8 * part}") for item in operand.items], ptx_type)
        raise Unsupported(f"operand {operand}")

    def _special(self, operand: Special, ptx_type: str) -> Source:
        if operand not in self.places:
            self.specials.append((operand.name, self._place(operand, 4)[1]))
        read = _row("u32", self.places[operand][1])
        return read if register_class(ptx_type) == 4 else _resized(read, ptx_type)

    def _address_row(self, symbol: Symbol, kind: str | int) -> int:
        """The row of the address of a parameter or a variable of a block or thread."""
        if symbol.name not in self.addresses:
            raise Unsupported(f"variable {symbol.name}")
        address = self.addresses[symbol.name]
        if address >= PARAMETERS:
            return self._constant(address, kind)
        if (symbol, kind) not in self.places:
            row = self._place((symbol, kind), kind)[1]
            self.shared_addresses.append((f"u{8 * int(kind)}", row, address))
        return self.places[symbol, kind][1]

    def target(self, operand: Operand, ptx_type: str) -> Target:
        """Writes values of a type to a register, extended by the type's sign, or to several."""
        if isinstance(operand, Nothing):
            return _drop
        if isinstance(operand, Vector):
            part = np.dtype(DTYPES[ptx_type]).itemsize // len(operand.items)
            return _split([self.target(item, f"b{8 * part}") for item in operand.items], part)
        if not isinstance(operand, Register):
            raise Unsupported(f"result in {operand}")
        kind, row = self.places[operand]
        if kind == register_class(ptx_type):
            return _store(ptx_type, row)
        signed = ptx_type.startswith("s")
        own = f"{'s' if signed else 'u'}{8 * int(kind)}"
        return _resized_store(own, row)

    def address(self, operand: Operand) -> Source:
        """The values of [base + offset] as unsigned 64-bit numbers."""
        assert isinstance(operand, Address), operand
        base = operand.base
        wide = isinstance(base, Symbol) or (
            isinstance(base, Register) and self.places[base][0] == 8
        )
        read = self.source(base, "u64" if wide else "u32")
        offset = np.uint64(operand.offset & (1 << 64) - 1)
        if operand.offset == 0:
            return lambda warp: read(warp).astype(np.uint64)
        return lambda warp: read(warp).astype(np.uint64) + offset


def registers_in(operands: tuple[Operand, ...]) -> frozenset[Register]:
    """Every register that the operands name."""
    found: set[Register] = set()
    for operand in operands:
        if isinstance(operand, Register):
            found.add(operand)
        elif isinstance(operand, Address):
            found |= registers_in((operand.base,))
        elif isinstance(operand, Vector):
            found |= registers_in(operand.items)
        elif isinstance(operand, Pair):
            found |= registers_in((operand.first, operand.second))
        elif isinstance(operand, TensorAddress):
            found |= registers_in((operand.map, *operand.coordinates))
        elif isinstance(operand, Negated):
            found.add(operand.register)
    return frozenset(found)


def _row(ptx_type: str, row: int) -> Source:
    place = (ptx_type, row)
    return lambda warp: warp.rows[place]


def _resized(read: Source, ptx_type: str) -> Source:
    dtype = np.dtype(DTYPES[ptx_type])
    plain = UNSIGNED[dtype.itemsize]
    return lambda warp: read(warp).astype(plain).view(dtype)


def _not(read: Source) -> Source:
    return lambda warp: ~read(warp)


def _joined(reads: list[Source], ptx_type: str) -> Source:
    """One value of several, the first in the lowest bits."""
    dtype = np.dtype(DTYPES[ptx_type])

    def read(warp: "Warp") -> Array:
        parts = np.stack([part(warp) for part in reads], -1)
        return parts.view(dtype)[:, 0]

    return read


def _split(writes: list[Target], size: int) -> Target:
    def write(warp: "Warp", values: Array, mask: Mask) -> None:
        parts = np.ascontiguousarray(values).view(UNSIGNED[size]).reshape(LANES, -1)
        for n, part in enumerate(writes):
            part(warp, parts[:, n], mask)

    return write


def _store(ptx_type: str, row: int) -> Target:
    place = (ptx_type, row)
    return lambda warp, values, mask: np.copyto(warp.rows[place], values, where=mask)


def _resized_store(ptx_type: str, row: int) -> Target:
    write = _store(ptx_type, row)
    dtype = DTYPES[ptx_type]
    return lambda warp, values, mask: write(warp, values.astype(dtype), mask)


def _drop(warp: "Warp", values: Array, mask: Mask) -> None:
    """A result that no register takes."""
