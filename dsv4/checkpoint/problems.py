"""Everything wrong with a checkpoint, collected and reported as one line."""

import re
from collections import Counter

from dsv4.errors import UserError, shorten

MAX_LISTED = 8


class Problems:
    """Findings by kind, in the order they were met: a count and the first ``MAX_LISTED`` of each.

    Not an exception itself: ``raise_if_any`` makes one of all of them.
    """

    def __init__(self) -> None:
        self._listed: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, finding: str) -> None:
        self._counts[kind] += 1
        listed = self._listed.setdefault(kind, [])
        if len(listed) < MAX_LISTED:
            listed.append(finding)

    def extend(self, other: "Problems") -> None:
        for kind, findings in other._listed.items():
            listed = self._listed.setdefault(kind, [])
            listed.extend(findings[: MAX_LISTED - len(listed)])
            self._counts[kind] += other._counts[kind]

    def __bool__(self) -> bool:
        return bool(self._counts)

    def summary(self) -> str:
        """One line: every kind with its count and its first findings."""
        return "; ".join(self._summary_of(kind) for kind in self._counts)

    def _summary_of(self, kind: str) -> str:
        listed = self._listed[kind]
        count = self._counts[kind]
        more = f" (and {count - len(listed)} more)" if count > len(listed) else ""
        return f"{count} {kind}: {', '.join(listed)}{more}"

    def raise_if_any(self, source: str) -> None:
        """Raises ``UserError`` with everything found, or returns when there is nothing."""
        if self._counts:
            raise UserError(f"{source}: {self.summary()}")


def printable(name: str) -> str:
    """A name from outside as a message may show it: unchanged if plain, otherwise escaped and
    shortened.
    """
    return name if re.fullmatch(r"[A-Za-z0-9_./*+-]{1,160}", name) else shorten(name)
