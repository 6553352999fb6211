"""The host half of a compiled kernel: an object file, relocated into memory and called."""

import ctypes
import mmap
import struct
from typing import NamedTuple

from tests.ptx.faults import Unsupported

_ALLOCATED = 2
_NO_CONTENT = 8
_SYMBOL_TABLE = 2
_RELOCATIONS = 4
_ABSOLUTE = 1
_RELATIVE = 24
_FROM_TABLE = 25
_TABLE_ENTRY = 27
_TABLE_RELATIVE = 29
_ENTRY = 8


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class HostObject:
    """An x86-64 ELF object of the large code model; what it lacks are addresses of ``symbols``."""

    def __init__(self, data: bytes, symbols: dict[str, int]):
        self._data = data
        self._sections = _sections(data)
        self._places: dict[int, int] = {}
        end = mmap.PAGESIZE
        for index, section in enumerate(self._sections):
            if section.flags & _ALLOCATED:
                end = -(-end // max(section.align, 1)) * max(section.align, 1)
                self._places[index] = end
                end += section.size
        # The global offset table follows the sections.
        table_start = -(-end // _ENTRY) * _ENTRY
        names = self._names()
        size = table_start + _ENTRY * (len(names) + 1)
        access = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, size, prot=access)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._table = self._base + table_start
        self._entries: dict[int, int] = {}
        for index, place in self._places.items():
            section = self._sections[index]
            if section.kind != _NO_CONTENT:
                content = data[section.offset : section.offset + section.size]
                self._memory[place : place + section.size] = content
        self._values = [self._address(name, where, symbols) for name, where in names]
        self.symbols = {
            name: value for (name, _), value in zip(names, self._values, strict=True) if name
        }
        for section in self._sections:
            if section.kind == _RELOCATIONS and section.info in self._places:
                self._relocate(section)

    def _names(self) -> list[tuple[str, tuple[int, int]]]:
        """Name, section and offset of every symbol."""
        table = next(s for s in self._sections if s.kind == _SYMBOL_TABLE)
        strings = self._sections[table.link].offset
        found = []
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self._data, at)
            start = strings + name
            text = self._data[start : self._data.index(b"\0", start)].decode()
            found.append((text, (section, value)))
        return found

    def _address(self, name: str, where: tuple[int, int], symbols: dict[str, int]) -> int:
        section, offset = where
        if name == "_GLOBAL_OFFSET_TABLE_":
            return self._table
        if section == 0:
            # Calling what nobody provides ends at address 0.
            return symbols.get(name, 0)
        return self._base + self._places.get(section, 0) + offset

    def _relocate(self, section: _Section) -> None:
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", self._data, at)
            place = self._base + self._places[section.info] + offset
            value = self._relocated(info & 0xFFFFFFFF, info >> 32, place) + addend
            ctypes.c_uint64.from_address(place).value = value & (1 << 64) - 1

    def _relocated(self, kind: int, symbol: int, place: int) -> int:
        value = self._values[symbol]
        if kind == _ABSOLUTE:
            return value
        if kind == _RELATIVE:
            return value - place
        if kind == _FROM_TABLE:
            return value - self._table
        if kind == _TABLE_RELATIVE:
            return self._table - place
        if kind == _TABLE_ENTRY:
            entry = self._entries.setdefault(symbol, _ENTRY * len(self._entries))
            ctypes.c_uint64.from_address(self._table + entry).value = value
            return entry
        raise Unsupported(f"relocation {kind}")


def _sections(data: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return [
        _Section(*struct.unpack_from("<IIQQQQIIQQ", data, start + n * size)) for n in range(count)
    ]
