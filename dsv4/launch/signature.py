"""The arguments of a kernel, by name and type, from its ``extern "C" __global__`` signature."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes

OPS = Path(__file__).parent.parent / "ops"
SHARED_HEADERS = OPS / "_device"

# What a pointer to these may point to; a pointer to anything else takes a tensor of any dtype.
_POINTEE = {
    "bf16": (torch.bfloat16,),
    "float": (torch.float32,),
    "int64": (torch.int64,),
    "settled_int64": (torch.int64,),
    "settled_float": (torch.float32,),
    "int": (torch.int32,),
    "unsigned": (torch.int32, torch.uint32),
}
_INTEGERS = {
    "int": range(-(1 << 31), 1 << 31),
    "unsigned": range(1 << 32),
    "int64": range(-(1 << 63), 1 << 63),
}
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIER = re.compile(r"\b(const|__restrict__|__grid_constant__)\b")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. ``type`` without const; ``pointer``: it points to values of that
    type; ``constant``: to values that the kernel does not write.
    """

    name: str
    type: str
    pointer: bool
    constant: bool = False

    @property
    def read_early(self) -> bool:
        """Whether the kernel reads it in front of its wait (``dsv4.launch.settled``)."""
        return self.type.startswith("settled_")

    @property
    def names_boxes(self) -> bool:
        """Whether it takes ``Boxes``."""
        return self.type == "TensorMap"

    def problem(self, argument: object) -> str | None:
        """The fault in passing this argument, as "found …, expected …"; None without one."""
        if self.pointer:
            if argument is None:
                return None
            if not isinstance(argument, Tensor):
                return f"found {argument!r}, expected a tensor or None ({self.type}*)"
            fits = argument.dtype in _POINTEE.get(self.type, (argument.dtype,))
            return None if fits else f"found {argument.dtype}, expected {self.type}*"
        if self.names_boxes:
            fits = isinstance(argument, Boxes)
            return None if fits else f"found {argument!r}, expected boxes of a tensor"
        if self.type == "float":
            fits = isinstance(argument, int | float)
            return None if fits else f"found {argument!r}, expected a float"
        fits = isinstance(argument, int) and argument in _INTEGERS[self.type]
        return None if fits else f"found {argument!r}, expected {self.type}"


@dataclass(frozen=True)
class Signature:
    """A kernel's parameters in their order."""

    kernel: str
    parameters: tuple[Parameter, ...]

    def takes_arguments_of(self, other: "Signature") -> bool:
        """Whether arguments of the other kernel are those of this one, word for word."""
        own, others = (
            [(one.name, one.type.removeprefix("settled_"), one.pointer) for one in of.parameters]
            for of in (self, other)
        )
        return own == others

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ``TypeError`` naming every missing, extra and mistyped argument."""
        names = [parameter.name for parameter in self.parameters]
        problems = [f"{name}: missing" for name in names if name not in arguments]
        problems += [f"{name}: not an argument" for name in arguments if name not in names]
        for parameter in self.parameters:
            if parameter.name in arguments:
                problem = parameter.problem(arguments[parameter.name])
                if problem is not None:
                    problems.append(f"{parameter.name}: {problem}")
        if problems:
            raise TypeError(f"{self.kernel}: {'; '.join(problems)}")


@cache
def source_path(source: str) -> Path:
    """The file of ``"<op>/<stem>"``: ``dsv4/ops/<op>/<stem>.cu``."""
    return OPS / f"{source}.cu"


@cache
def signature(source: str, function: str) -> Signature:
    """The signature of ``function`` in ``source`` or a header that it includes.

    Raises ``KeyError`` when there is no such entry.
    """
    path = source_path(source)
    for text in _texts(path, path.parent, set()):
        for name, parameters in _entries(text):
            if name == function:
                return Signature(function, parameters)
    raise KeyError(f'{path.name}: found no extern "C" __global__ {function}')


def entries(path: Path) -> list[Signature]:
    """Every kernel that a file itself declares."""
    text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    return [Signature(name, parameters) for name, parameters in _entries(text)]


def _texts(path: Path, folder: Path, seen: set[Path]) -> Iterator[str]:
    if path in seen:
        return
    seen.add(path)
    text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    yield text
    for name in _INCLUDE.findall(text):
        for parent in (folder, SHARED_HEADERS):
            if (parent / name).is_file():
                yield from _texts(parent / name, parent, seen)
                break


def _entries(text: str) -> Iterator[tuple[str, tuple[Parameter, ...]]]:
    for match in _ENTRY.finditer(text):
        at = match.end()
        if text.startswith("__launch_bounds__", at):
            at = _closing(text, text.index("(", at)) + 1
        opening = text.index("(", at)
        declared = text[opening + 1 : _closing(text, opening)]
        yield (
            text[at:opening].strip(),
            tuple(map(_parameter, filter(str.strip, declared.split(",")))),
        )


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens at ``opening`` closes."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError("a kernel's parameter list does not end")


def _parameter(declared: str) -> Parameter:
    words = _QUALIFIER.sub(" ", declared).replace("*", " * ").split()
    type_name = " ".join(word for word in words[:-1] if word != "*")
    pointer = "*" in words
    constant = pointer and re.match(r"\s*const\b", declared) is not None
    return Parameter(words[-1], type_name, pointer, constant)
