"""Calls of functions in PTX text, written out: where one is called stands its body, with names of
its own. What is passed and returned lies in registers.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.ptx.faults import Unsupported

_FUNCTION = re.compile(
    r"(?:\.visible\s+|\.weak\s+)?\.func\s*(?:\(([^)]*)\))?\s*([\w$]+)\s*\(([^)]*)\)\s*\{"
)
# The compiler puts braces around a call and what is passed and returned.
_CALL = re.compile(
    r"\{(?P<before>[^{}]*)\bcall(?:\.uni)?\s+(?:\((?P<result>\w+)\)\s*,)?\s*"
    r"(?P<name>[\w$]+)\s*(?:,\s*\((?P<passed>[^()]*)\))?\s*;(?P<after>[^{}]*)\}"
)
_STORE = re.compile(r"\bst\.param\.[bsuf](\d+)\s+\[([\w$]+)(?:\+(\d+))?\]\s*,\s*([^,;]+);")
_LOAD = re.compile(r"\bld\.param\.[bsuf](\d+)\s+([%\w$]+)\s*,\s*\[([\w$]+)(?:\+(\d+))?\];")
_SEVERAL = re.compile(
    r"\b(?P<opcode>st|ld)\.param\.v[24]\.(?P<type>[bsuf](?P<bits>\d+))\s+"
    r"(?:\{(?P<loaded>[^}]*)\}\s*,\s*)?\[(?P<name>[\w$]+)(?:\+(?P<offset>\d+))?\]"
    r"(?:\s*,\s*\{(?P<stored>[^}]*)\})?;"
)
_REGISTERS = re.compile(r"\.reg\s+\.\w+\s+(%\w*?)<\d+>")


class _Function(NamedTuple):
    results: list[str]
    parameters: list[str]
    body: str


def body_at(text: str, start: int) -> str:
    """What stands between a brace that was opened in front of ``start`` and the one that closes
    it.
    """
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    raise Unsupported("a function without an end")


def written_out(text: str) -> str:
    """A module without comments, of entry functions alone. Functions that call themselves have no
    end.
    """
    functions = {}
    text = _SEVERAL.sub(_one_by_one, text)
    while (head := _FUNCTION.search(text)) is not None:
        body = body_at(text, head.end())
        functions[head[2]] = _Function(_names(head[1]), _names(head[3]), body)
        text = text[: head.start()] + text[head.end() + len(body) + 1 :]
    return _expanded(text, functions, itertools.count())


def _names(declared: str | None) -> list[str]:
    """Of ``.param .align 4 .b8 name[12], ...``."""
    return re.findall(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)", declared or "")


def _one_by_one(access: re.Match[str]) -> str:
    """Accesses of a number each instead of that of a vector."""
    size = int(access["bits"]) // 8
    first = int(access["offset"] or 0)
    lines = []
    for n, value in enumerate((access["loaded"] or access["stored"]).split(",")):
        place = f"[{access['name']}+{first + n * size}]"
        operands = f"{value}, {place}" if access["loaded"] else f"{place}, {value}"
        lines.append(f"{access['opcode']}.param.{access['type']} {operands};")
    return "\n".join(lines)


def _expanded(text: str, functions: dict[str, _Function], numbers: Iterator[int]) -> str:
    def body(call: re.Match[str]) -> str:
        function = functions.get(call["name"])
        if function is None:
            raise Unsupported(f"call of {call['name']}")
        number = next(numbers)
        registers: dict[str, str] = {}
        outside = {name: f"%call{number}_{n}" for n, name in enumerate(_names(call["passed"]))}
        inside = {name: f"%call{number}_{n}" for n, name in enumerate(function.parameters)}
        if call["result"]:
            outside[call["result"]] = inside[function.results[0]] = f"%call{number}_result"
        before = _in_registers(call["before"], outside, registers)
        own = _in_registers(_renamed(function.body, number), inside, registers)
        after = _in_registers(call["after"], outside, registers)
        declared = "".join(f".reg .b{bits} {name};\n" for name, bits in registers.items())
        own = _expanded(own, functions, numbers)
        return f"{{\n{declared}{before}{{{own}\n$end{number}:\n}}{after}}}"

    return _CALL.sub(body, text)


def _renamed(body: str, number: int) -> str:
    """The body as that of one call: it ends at a label."""
    for prefix in set(_REGISTERS.findall(body)):
        body = re.sub(re.escape(prefix) + r"(?=[\d<])", f"%in{number}_{prefix[1:]}", body)
    body = re.sub(r"\$(\w+)", rf"$\1_{number}", body)
    return re.sub(r"\bret(\.uni)?\s*;", f"bra $end{number};", body)


def _in_registers(text: str, names: dict[str, str], registers: dict[str, str]) -> str:
    """Moves instead of accesses to the parameters ``names``; ``registers`` gets the bits of each
    part that is accessed.
    """

    def register(name: str, offset: str | None, bits: str) -> str:
        found = f"{names[name]}_{offset or 0}"
        registers[found] = bits
        return found

    def store(access: re.Match[str]) -> str:
        bits, name, offset, value = access.groups()
        return (
            f"mov.b{bits} {register(name, offset, bits)}, {value};" if name in names else access[0]
        )

    def load(access: re.Match[str]) -> str:
        bits, value, name, offset = access.groups()
        return (
            f"mov.b{bits} {value}, {register(name, offset, bits)};" if name in names else access[0]
        )

    return _LOAD.sub(load, _STORE.sub(store, text))
