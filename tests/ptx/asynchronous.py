"""Work that goes on beside the warps."""

from collections import deque
from collections.abc import Callable, Hashable

from tests.ptx.schedule import Choices

Event = Callable[[], None]


class Asynchronous:
    """Copies and products that were issued and have not happened."""

    def __init__(self) -> None:
        self._free: list[Event] = []
        self._lines: dict[Hashable, deque[Event]] = {}
        self._last: list[Event] = []

    def add(self, event: Event) -> None:
        """Something that may happen at any time."""
        self._free.append(event)

    def add_last(self, event: Event) -> None:
        """Something that happens when nothing else is on its way."""
        self._last.append(event)

    def add_in_order(self, line: Hashable, event: Event) -> None:
        """Something that happens after everything added to the same line."""
        self._lines.setdefault(line, deque()).append(event)

    def __bool__(self) -> bool:
        return bool(self._free or self._lines or self._last)

    def happen(self, choices: Choices) -> None:
        """Lets one thing happen."""
        waiting = [*range(len(self._free)), *self._lines]
        if not waiting:
            self._last.pop(choices.one(range(len(self._last))))()
            return
        chosen = choices.one(waiting)
        if isinstance(chosen, int):
            self._free.pop(chosen)()
            return
        line = self._lines[chosen]
        event = line.popleft()
        if not line:
            del self._lines[chosen]
        event()
