"""Strings that end a text, though the text comes in pieces."""

from collections.abc import Iterable

from .messages import check_string


class StopStrings:
    """Text up to the first stop string. What may be the beginning of one is held back.

    The string that is complete first counts, of several that end with the same character the
    longest; so the result does not depend on the pieces. `found` is that string, None until then.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty string, for what is none, and for a lone one, whose
        characters would be the stops.
        """
        if isinstance(stops, str | bytes) or not isinstance(stops, Iterable):
            raise ValueError(f"stops is {type(stops).__name__}, expected a list of strings")
        self._stops = tuple(stops)
        for stop in self._stops:
            check_string(stop, "stop")
        if "" in self._stops:
            raise ValueError("found an empty stop string")
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The characters that are certain to come before a stop string; nothing behind one."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        ends = [(end, size, stop) for end, size, stop in ends if stop in text]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        held = max((_beginning(stop, text) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held = self._held
        self._held = ""
        return held


def _beginning(stop: str, text: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
