"""Everything wrong with a checkpoint, collected and reported as one line."""

import re

from dsv4.config import shorten
from dsv4.errors import UserError

MAX_LISTED = 8


class Problems:
    """Findings by kind, in the order they were met. Not an exception: ``raise_if_any`` makes one of all of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, finding: str) -> None:
        self._found.setdefault(kind, []).append(finding)

    def extend(self, other: "Problems") -> None:
        for kind, findings in other._found.items():
            self._found.setdefault(kind, []).extend(findings)

    def __bool__(self) -> bool:
        return bool(self._found)

    def summary(self) -> str:
        """One line: every kind with its count and its first findings."""
        return "; ".join(f"{len(found)} {kind}: {_listing(found)}" for kind, found in self._found.items())

    def raise_if_any(self, source: str) -> None:
        """Raises ``UserError`` with everything found, or returns when there is nothing."""
        if self._found:
            raise UserError(f"{source}: {self.summary()}")


def _listing(findings: list[str]) -> str:
    listed = ", ".join(findings[:MAX_LISTED])
    more = len(findings) - MAX_LISTED
    return f"{listed} (and {more} more)" if more > 0 else listed


def printable(name: str) -> str:
    """A name from outside as a message may show it: unchanged if plain, otherwise escaped and shortened."""
    return name if re.fullmatch(r"[A-Za-z0-9_./*+-]{1,160}", name) else shorten(name)
