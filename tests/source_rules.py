"""Rules that are checked on the syntax trees of ``dsv4``, ``encoding`` and the driver."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DRIVER = "single_shot_inference.py"


class Source(NamedTuple):
    """A module: its path from the root of the repository, its text and every node of its tree."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        tree = ast.parse(text, path)
        return cls(path, text, tree, tuple(ast.walk(tree)))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# Lines and messages of what is forbidden.
Rule = Callable[[Source], Iterator[tuple[int, str]]]


@cache
def read_sources() -> tuple[Source, ...]:
    """Every module that the rules are for; once per process."""
    packages = [file for name in ("dsv4", "encoding") for file in (ROOT / name).rglob("*.py")]
    files = sorted((*packages, ROOT / DRIVER))
    texts = [
        (file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files
    ]
    return tuple(Source.parse(path, text) for path, text in texts)


def violations(
    rule: Rule, exceptions: tuple[str, ...] = (), sources: tuple[Source, ...] | None = None
) -> list[str]:
    """What the rule finds in the sources (all of them, unless given) outside the exceptions."""
    checked = read_sources() if sources is None else sources
    return [
        f"{source.path}:{line}: {message}"
        for source in checked
        if not source.path.startswith(exceptions)
        for line, message in rule(source)
    ]


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Every line that imports, with the module or a name in it."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from dsv4 import config` names a module as well as `from dsv4.config import
            # ModelConfig` does.
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the last part of the called name."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, node.func.id if isinstance(node.func, ast.Name) else node.func.attr
