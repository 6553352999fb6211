"""Reading tool-call tags as models really write them (model.md#parsing).

The prescribed tags are `<｜DSML｜tool_calls>`, `<｜DSML｜invoke name="f">`,
`<｜DSML｜parameter name="p" string="true">` and `</｜DSML｜…>`. Also accepted: ASCII bars
(`|DSML|`), spaces and line breaks around attributes, single quotes, a slash after the marker
(`<｜DSML｜/invoke>`), and tags without a marker. Only the prescribed marker is a token of its own;
where text may quote tags that are written otherwise, the caller says which ones count.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from .control_tokens import DSML, EOS

TAG_NAMES = ("tool_calls", "invoke", "parameter")
# A tag is at most this long: long names fit, and a stray marker never holds text back for long.
MAX_TAG_CHARACTERS = 4096
# No start that `find_tag_start` looks for is longer.
MAX_START_CHARACTERS = 24
MARKED_STARTS = tuple(
    f"<{slash}{left}DSML{right}" for slash in ("", "/") for left in "｜|" for right in "｜|"
)
PRESCRIBED_STARTS = (f"<{DSML}", f"</{DSML}")

# Not possessive, although nothing is gained by backtracking: Python 3.11.2 misreads possessive
# groups.
_ATTRIBUTES = r"""(?:[^"'<>]|"[^"]*"|'[^']*')*"""
_MARKER = r"[｜|]DSML[｜|]"
_TAG = re.compile(rf"<(/?)({_MARKER})?(/?)\s*({'|'.join(TAG_NAMES)})(?=[\s>])({_ATTRIBUTES})>")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_BEGINNING = re.compile(rf"</?(?:{_MARKER})?/?\s*(\w*)(.*)", re.DOTALL)
_UNFINISHED_ATTRIBUTES = re.compile(rf"""\s{_ATTRIBUTES}(?:"[^"]*|'[^']*)?""")
_FEW_SPACES = re.compile(r"\s{0,16}")


class Marker(IntEnum):
    """What stands before the name of a tag. Who reads tags with one of them reads those with the
    ones before it too.
    """

    PRESCRIBED = 0
    ASCII_BARS = 1
    MISSING = 2


_START = re.compile(rf"{re.escape(EOS)}|</?{DSML}")
_STARTS = {
    Marker.PRESCRIBED: _START,
    Marker.ASCII_BARS: re.compile(rf"{_START.pattern}|</?{_MARKER}"),
    Marker.MISSING: re.compile(
        rf"{_START.pattern}|</?{_MARKER}|</?(?:{'|'.join(TAG_NAMES)})(?=[\s>])"
    ),
}


@dataclass(frozen=True)
class Tag:
    """One tag of a text, or the EOS that may stand in its place (name "eos")."""

    start: int
    end: int
    name: str
    closing: bool = False
    attributes: dict[str, str] | None = None
    marker: Marker = Marker.PRESCRIBED
    repair: str | None = None

    def attribute(self, name: str) -> str | None:
        """Value of the attribute, None if the tag lacks it."""
        return (self.attributes or {}).get(name)


def read_tag(text: str, start: int) -> Tag | None:
    """The whole tag, with or without marker, that begins at `start`, if one does."""
    if text.startswith(EOS, start):
        return Tag(start, start + len(EOS), "eos")
    match = _TAG.match(text, start, _furthest_end(text, start))
    if match is None:
        return None
    slash, bars, late_slash, name, source = match.groups()
    marker = {None: Marker.MISSING, DSML: Marker.PRESCRIBED}.get(bars, Marker.ASCII_BARS)
    attributes = {key: a or b or c for key, a, b, c in _ATTRIBUTE.findall(source)}
    closing = bool(slash or late_slash)
    repair = _repair(match[0], marker, name, closing, attributes)
    return Tag(start, match.end(), name, closing, attributes, marker, repair)


def may_become_tag(text: str, start: int) -> bool:
    """Whether the text from `start` to its end is the beginning of a tag, or of EOS, that more text
    could complete.
    """
    if len(text) - start >= MAX_TAG_CHARACTERS or _furthest_end(text, start) < len(text):
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


def _furthest_end(text: str, start: int) -> int:
    """Where a tag that begins at `start` has ended at the latest. EOS is no part of a quoted
    attribute: it ends the completion, whatever was left open in front of it.
    """
    end = min(len(text), start + MAX_TAG_CHARACTERS)
    eos = text.find(EOS, start, end)
    return end if eos < 0 else eos


def find_tag_start(text: str, start: int, marker: Marker) -> int | None:
    """Where from `start` on an EOS or the beginning of a tag with this marker, or one before it,
    follows; None if nowhere.
    """
    match = _STARTS[marker].search(text, start)
    return None if match is None else match.start()


def opens_block(text: str, start: int, names: Collection[str] | None) -> bool | None:
    """Whether at `start` a block of tool calls is opened and in it a call, by its name, of one of
    `names` (None: of any); None if only more text can tell.
    """
    called = None
    if names is not None and not names:
        return False
    for name in ("tool_calls", "invoke"):
        tag = read_tag(text, start)
        if tag is None:
            return None if may_become_tag(text, start) else False
        if tag.name != name or tag.closing:
            return False
        called = tag.attribute("name")
        space = _FEW_SPACES.match(text, tag.end)
        start = space.end() if space else tag.end
    return bool(called) and (names is None or called in names)


def _repair(
    source: str, marker: Marker, name: str, closing: bool, attributes: dict[str, str]
) -> str | None:
    """How the tag deviates from the prescribed writing, None if it does not."""
    if marker is Marker.MISSING:
        return "missing_dsml_marker"
    if marker is Marker.ASCII_BARS:
        return "ascii_bars"
    written = "".join(f' {key}="{value}"' for key, value in attributes.items())
    if source == f"<{'/' if closing else ''}{DSML}{name}{written}>":
        return None
    return "closing_tag_variant" if closing else "opening_tag_variant"
