"""The text that a streaming parser has been given and not yet used."""

import re

_SPACE = re.compile(r"\s*")


class Scanner:
    """`text` from `at` on is unused, and up to `scanned` it is known to hold no marker, so that it
    is searched once.

    `final` says that no more text will come. Positions but `position` are valid until the next
    `append` or `push_back`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._forgotten = 0  # characters in front of `text`
        self.scanned = 0
        self.final = False

    def append(self, text: str) -> None:
        """Adds text and forgets what was used."""
        self._forgotten += self.at
        self.text = self.text[self.at :] + text
        self.scanned = max(0, self.scanned - self.at)
        self.at = 0

    def advance_to(self, position: int) -> None:
        """Everything before `position` is used."""
        self.at = position
        self.scanned = position

    def push_back(self, text: str) -> None:
        """Puts the text that was used last back in front of the unused, to be searched again."""
        self._forgotten = self.position - len(text)
        self.text = text + self.text[self.at :]
        self.at = 0
        self.scanned = 0

    def take_until(self, position: int) -> str:
        """Uses the text before `position` and returns it."""
        start = self.at
        self.advance_to(position)
        return self.text[start:position]

    def take_space(self) -> str:
        """Uses the white space that comes next and returns it."""
        space = _SPACE.match(self.text, self.at)
        return self.take_until(space.end()) if space else ""

    @property
    def position(self) -> int:
        """The characters that are used, of all that were given."""
        return self._forgotten + self.at

    @property
    def is_empty(self) -> bool:
        """Whether all text is used."""
        return self.at == len(self.text)
