"""PTX text as data: the entry functions of a module and their instructions.

A name that is declared between braces inside a function is its own in every such pair of braces.
"""

import functools
import re
import struct
from collections.abc import Iterator

from tests.ptx.calls import body_at, written_out
from tests.ptx.faults import Unsupported
from tests.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Negated,
    Nothing,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)

SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|cluster_n?ctaid|cluster_n?ctarank|n?clusterid)(\.[xyz])?$"
    r"|%(laneid|n?warpid|is_explicit_cluster|dynamic_smem_size|clock64)$"
)


_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))"
)
_VARIABLE = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.[busf](8|16|32|64)\s+"
    r"([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*(\{[^}]*\}|[^;]+))?;"
)


@functools.cache
def parse(ptx: str) -> dict[str, Function]:
    """The entry functions of a module by name."""
    text = written_out(re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL))
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text))
    if not heads:
        raise Unsupported("no entry function")
    module = tuple(_variables(text[: heads[0].start()]))
    return {head[1]: _function(head, body_at(text, head.end()), module) for head in heads}


def _variables(text: str) -> Iterator[Variable]:
    for space, align, bits, name, dimensions, values in _VARIABLE.findall(text):
        size = _BYTES[bits]
        content = b""
        if values:
            numbers = re.findall(r"-?\w+", values)
            content = b"".join(_bits(number, size) for number in numbers)
        for dimension in re.findall(r"\[(\d*)\]", dimensions):
            size *= int(dimension or 0)
        yield Variable(name, space, int(align or _BYTES[bits]), size, content.ljust(size, b"\0"))


def _bits(number: str, size: int) -> bytes:
    value = int(number[2:], 16) if number[:2].lower() in ("0f", "0d") else int(number, 0)
    return (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def _function(head: re.Match[str], body: str, module: tuple[Variable, ...]) -> Function:
    name, parameters, directives = head.groups()
    sizes = []
    for bits, parameter, count in re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.[busf](8|16|32|64)\s+([\w$]+)(?:\[(\d+)\])?",
        # A pointer parameter may say where it points to.
        re.sub(r"\.ptr(\s+\.(global|shared|const|local))?(\s+\.align\s+\d+)?", "", parameters),
    ):
        sizes.append((parameter, _BYTES[bits] * int(count or 1)))
    found = {
        key: tuple(map(int, re.findall(r"\d+", numbers)))
        for key, numbers in re.findall(r"\.(\w+)([ \t\d,]*)", directives)
    }
    reader = _Reader()
    reader.read(body)
    variables = (*module, *_variables(body))
    return Function(
        name,
        found,
        tuple(sizes),
        variables,
        reader.registers,
        tuple(reader.instructions),
        reader.labels,
    )


class _Reader:
    """Collects what the body of a function declares and does."""

    def __init__(self) -> None:
        self.registers: dict[str, str] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.scopes: list[tuple[str, set[str]]] = [("", set())]
        self.scope_count = 0

    def read(self, body: str) -> None:
        at = 0
        end = len(body.rstrip())
        while at < end:
            match = _STATEMENT.match(body, at)
            if match is None:
                raise Unsupported(f"syntax: {body[at : at + 80]!r}")
            at = match.end()
            if match["open"]:
                self.scope_count += 1
                self.scopes.append((f"@{self.scope_count}", set()))
            elif match["close"]:
                self.scopes.pop()
            elif match["label"]:
                self.labels[self._label(match["label"])] = len(self.instructions)
            else:
                self._statement(" ".join(match["statement"][:-1].split()))

    def _label(self, name: str) -> str:
        return name if name.startswith("$") else name + self.scopes[-1][0]

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
        elif text and not text.startswith("."):
            self._instruction(text)

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        scope, local = self.scopes[-1]
        for name, count in re.findall(r"([%\w$]+)(?:<(\d+)>)?", names):
            if count:
                self.registers.update({f"{name}{n}": kind[1:] for n in range(int(count))})
            else:
                local.add(name)
                self.registers[name + scope] = kind[1:]

    def _instruction(self, text: str) -> None:
        guard = re.match(r"@(!?)([%\w$]+)\s+(.*)", text)
        rest = guard[3] if guard else text
        opcode, _, operands = rest.partition(" ")
        self.instructions.append(
            Instruction(
                text,
                opcode,
                tuple(opcode.split(".")),
                self._register(guard[2]) if guard else None,
                bool(guard and guard[1]),
                self._operands(opcode, _split(operands)),
            )
        )

    def _operands(self, opcode: str, parts: list[str]) -> tuple[Operand, ...]:
        if opcode.startswith("bra"):
            return tuple(Label(self._label(part)) for part in parts)
        return tuple(self._operand(part) for part in parts)

    def _register(self, name: str) -> Register | None:
        for scope, local in reversed(self.scopes):
            if name in local:
                return Register(name + scope)
        return Register(name) if name in self.registers else None

    def _operand(self, text: str) -> Operand:
        if text == "_":
            return Nothing()
        if text[0] == "{":
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1])
        if text[0] == "!":
            register = self._register(text[1:])
            assert register is not None
            return Negated(register)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        return self._register(text) or _constant(text) or self._name(text)

    def _name(self, text: str) -> Operand:
        if SPECIAL.match(text):
            return Special(text)
        if text.startswith("%"):
            raise Unsupported(f"register {text}")
        return Symbol(text)

    def _address(self, text: str) -> Operand:
        base, _, rest = text.partition(",")
        if rest:
            coordinates = self._operand(rest.strip())
            assert isinstance(coordinates, Vector)
            return TensorAddress(self._operand(base.strip()), coordinates.items)
        match = re.match(r"([%\w$]+)\s*(?:\+\s*(-?\w+))?$", text.strip())
        if match is None:
            raise Unsupported(f"address {text}")
        return Address(self._operand(match[1]), int(match[2] or "0", 0))


def _constant(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return None


def _split(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    parts = re.findall(r"(?:[^,{}\[\]]|\{[^{}]*\}|\[(?:[^\[\]{}]|\{[^{}]*\})*\])+", text)
    return [part.strip() for part in parts if part.strip()]
