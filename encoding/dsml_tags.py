"""Reading tool-call tags as models really write them (model.md#parsing).

The prescribed tags are `<｜DSML｜tool_calls>`, `<｜DSML｜invoke name="f">`,
`<｜DSML｜parameter name="p" string="true">` and `</｜DSML｜…>`. Also accepted: ASCII bars
(`|DSML|`), spaces and line breaks around attributes, single quotes, a slash after the marker
(`<｜DSML｜/invoke>`), and tags without a marker where the caller allows them.
"""

import re
from dataclasses import dataclass

from .control_tokens import DSML, EOS

TAG_NAMES = ("tool_calls", "invoke", "parameter")
# A tag is at most this long, so that a stray marker never holds text back for long.
MAX_TAG_CHARACTERS = 512
# No start that `find_tag_start` looks for is longer.
MAX_START_CHARACTERS = 24
MARKED_STARTS = tuple(
    f"<{slash}{left}DSML{right}" for slash in ("", "/") for left in "｜|" for right in "｜|"
)

# Not possessive, although nothing is gained by backtracking: Python 3.11.2 misreads possessive
# groups.
_ATTRIBUTES = r"""(?:[^"'<>]|"[^"]*"|'[^']*')*"""
_MARKER = r"[｜|]DSML[｜|]"
_TAG = re.compile(rf"<(/?)({_MARKER})?(/?)\s*({'|'.join(TAG_NAMES)})(?=[\s>])({_ATTRIBUTES})>")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_BEGINNING = re.compile(rf"</?(?:{_MARKER})?/?\s*(\w*)(.*)", re.DOTALL)
_UNFINISHED_ATTRIBUTES = re.compile(rf"""\s{_ATTRIBUTES}(?:"[^"]*|'[^']*)?""")
_START = re.compile(rf"{re.escape(EOS)}|</?{_MARKER}")
_START_ALSO_UNMARKED = re.compile(rf"{_START.pattern}|</?(?:{'|'.join(TAG_NAMES)})(?=[\s>])")


@dataclass(frozen=True)
class Tag:
    """One tag of a text, or the EOS that may stand in its place (name "eos")."""

    start: int
    end: int
    name: str
    closing: bool = False
    attributes: dict[str, str] | None = None
    repair: str | None = None

    def attribute(self, name: str) -> str | None:
        """Value of the attribute, None if the tag lacks it."""
        return (self.attributes or {}).get(name)


def read_tag(text: str, start: int) -> Tag | None:
    """The whole tag, with or without marker, that begins at `start`, if one does."""
    if text.startswith(EOS, start):
        return Tag(start, start + len(EOS), "eos")
    match = _TAG.match(text, start, min(len(text), start + MAX_TAG_CHARACTERS))
    if match is None:
        return None
    slash, marker, late_slash, name, source = match.groups()
    attributes = {key: a or b or c for key, a, b, c in _ATTRIBUTE.findall(source)}
    closing = bool(slash or late_slash)
    repair = _repair(match[0], marker, name, closing, attributes)
    return Tag(start, match.end(), name, closing, attributes, repair)


def may_become_tag(text: str, start: int) -> bool:
    """Whether the text from `start` to its end is the beginning of a tag, or of EOS, that more text
    could complete.
    """
    if len(text) - start >= MAX_TAG_CHARACTERS:
        return False
    if any(literal.startswith(text[start:]) for literal in (EOS, *MARKED_STARTS)):
        return True
    match = _BEGINNING.match(text, start)
    if match is None:
        return False
    word, rest = match.groups()
    if not rest:
        return any(name.startswith(word) for name in TAG_NAMES)
    return word in TAG_NAMES and _UNFINISHED_ATTRIBUTES.fullmatch(rest) is not None


def find_tag_start(text: str, start: int, also_unmarked: bool) -> int | None:
    """Where from `start` on a marker, an EOS or, if asked for, a tag name without marker follows;
    None if nowhere.
    """
    match = (_START_ALSO_UNMARKED if also_unmarked else _START).search(text, start)
    return None if match is None else match.start()


def _repair(
    source: str, marker: str | None, name: str, closing: bool, attributes: dict[str, str]
) -> str | None:
    """How the tag deviates from the prescribed writing, None if it does not."""
    if marker is None:
        return "missing_dsml_marker"
    if marker != DSML:
        return "ascii_bars"
    written = "".join(f' {key}="{value}"' for key, value in attributes.items())
    if source == f"<{'/' if closing else ''}{DSML}{name}{written}>":
        return None
    return "closing_tag_variant" if closing else "opening_tag_variant"
