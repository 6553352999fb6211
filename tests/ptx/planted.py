"""A planted fault: the kernel, the edit of its PTX, and what the machine must find."""

from typing import NamedTuple

from tests.ptx.edits import Edit


class WrongValues(Exception):
    """Bits of the result that differ from the reference."""


Finding = type[Exception]


class Planted(NamedTuple):
    """A fault; any of the findings will do."""

    name: str
    kernel: str
    edit: Edit
    findings: tuple[Finding, ...]
