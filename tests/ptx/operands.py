"""Registers of a warp, and what an instruction's operands are to it.

A warp keeps every virtual register as a row of 32 lanes. Constants, special registers and addresses
of variables are rows as well, so that an instruction reads all of its operands alike.
"""

from typing import Any

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.rows import (
    CLASS_DTYPES,
    DTYPES,
    LANES,
    Array,
    Place,
    Row,
    RowStore,
    Source,
    Target,
    drop,
    inverted,
    joined,
    register_class,
    resized,
    resized_store,
    split,
)
from tests.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Negated,
    Nothing,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
)

PARAMETERS = 1 << 40
"""The address of the first kernel parameter."""
LOCAL = 1 << 42
"""The address of every thread's first local variable."""
SHARED = 1 << 44
"""The generic address of shared memory's address 0."""
SHARED_START = 1024
"""Shared memory below this address belongs to the system."""


class Layout:
    """Which row each register, constant and special register of a function has."""

    def __init__(self, function: Function):
        self.function = function
        self.places: dict[Any, tuple[str | int, int]] = {}
        self.counts: dict[str | int, int] = dict.fromkeys(CLASS_DTYPES, 0)
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
        # Variables of the module whose addresses are taken, in memory of this process.
        self.tables: dict[str, Array] = {}

    def _place_variables(self, space: str, at: int) -> int:
        """Gives those of a space addresses from ``at`` on; returns where they end."""
        variables = [v for v in self.function.variables if v.space == space]
        # Those without a size are last: the launch decides about it.
        for variable in sorted(variables, key=lambda variable: variable.size == 0):
            at = -(-at // variable.align) * variable.align
            self.addresses[variable.name] = at
            at += variable.size
        return at

    def _place_table(self, name: str) -> int:
        found = [v for v in self.function.variables if v.name == name and v.space == "global"]
        if not found:
            raise Unsupported(f"variable {name}")
        self.tables[name] = np.frombuffer(bytearray(found[0].content), np.uint8)
        return self.tables[name].ctypes.data

    def _place(self, key: Any, kind: str | int) -> tuple[str | int, int]:
        place = (kind, self.counts[kind])
        self.places[key] = place
        self.counts[kind] += 1
        return place

    def classes(self) -> dict[str | int, Array]:
        """Rows of a warp before it starts: poison, and the constants."""
        found = {kind: np.empty((n, LANES), CLASS_DTYPES[kind]) for kind, n in self.counts.items()}
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

    def row_in_place(self, operand: Operand, ptx_type: str) -> Place:
        """The row of a register that is written in place; its class must be that of the type."""
        if not isinstance(operand, Register) or self.places[operand][0] != register_class(ptx_type):
            raise Unsupported(f"{operand} as {ptx_type}")
        return ptx_type, self.places[operand][1]

    def source(self, operand: Operand, ptx_type: str) -> Source:
        """Reads an operand as values of a type.

        Of a wider register the low bits, of a narrower one zero-extended ones.
        """
        if isinstance(operand, Register):
            kind, row = self.places[operand]
            if kind == register_class(ptx_type):
                return Row((ptx_type, row))
            own = "pred" if kind == "pred" else f"u{8 * int(kind)}"
            return resized(Row((own, row)), ptx_type)
        if isinstance(operand, Immediate):
            return Row((ptx_type, self._constant(operand.bits, register_class(ptx_type))))
        if isinstance(operand, Symbol):
            return Row((ptx_type, self._address_row(operand, register_class(ptx_type))))
        if isinstance(operand, Special):
            return self._special(operand, ptx_type)
        if isinstance(operand, Negated):
            return inverted(self.source(operand.register, "pred"))
        if isinstance(operand, Vector):
            part = np.dtype(DTYPES[ptx_type]).itemsize // len(operand.items)
            return joined([self.source(item, f"b{8 * part}") for item in operand.items], ptx_type)
        raise Unsupported(f"operand {operand}")

    def _special(self, operand: Special, ptx_type: str) -> Source:
        if operand not in self.places:
            self.specials.append((operand.name, self._place(operand, 4)[1]))
        read = Row(("u32", self.places[operand][1]))
        return read if register_class(ptx_type) == 4 else resized(read, ptx_type)

    def _address_row(self, symbol: Symbol, kind: str | int) -> int:
        """The row of the address of a parameter or a variable of a block or thread."""
        if symbol.name not in self.addresses:
            self.addresses[symbol.name] = self._place_table(symbol.name)
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
            return drop
        if isinstance(operand, Vector):
            part = np.dtype(DTYPES[ptx_type]).itemsize // len(operand.items)
            return split([self.target(item, f"b{8 * part}") for item in operand.items], part)
        if not isinstance(operand, Register):
            raise Unsupported(f"result in {operand}")
        kind, row = self.places[operand]
        if kind == register_class(ptx_type):
            return RowStore((ptx_type, row))
        signed = ptx_type.startswith("s")
        own = f"{'s' if signed else 'u'}{8 * int(kind)}"
        return resized_store(own, row)

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
