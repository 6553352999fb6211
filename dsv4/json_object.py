"""JSON files that must hold one object, with errors that name the file."""

import json
import math
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dsv4.errors import UserError, shorten

# The index of the largest published checkpoint, one entry per stored tensor, has about a third.
MAX_JSON_BYTES = 100_000_000


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file that must hold an object, of at most ``MAX_JSON_BYTES``. Raises
    ``UserError`` naming the file.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: cannot be read (found something else than a regular file)")
        if status.st_size > MAX_JSON_BYTES:
            raise UserError(
                f"{path}: found {status.st_size} bytes, expected at most {MAX_JSON_BYTES}"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read (byte {error.start} is not UTF-8)") from None
    return parse_json_object(text, str(path))


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """Parses JSON text that must be an object, without repeated keys and with finite numbers only;
    ``source`` names it in errors (``UserError``).
    """
    try:
        if text.startswith("\ufeff"):
            raise ValueError("found a byte order mark, expected none")
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=parse_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{source}: found a JSON {type(value).__name__}, expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {shorten(max(counts, key=counts.__getitem__))} occurs twice")
    return value


def parse_integer(text: str) -> int:
    """An integer of JSON. Raises ``ValueError`` for one of more digits than Python reads, whose own
    advice is for programmers.
    """
    try:
        return int(text)
    except ValueError:
        digits = len(text.removeprefix("-"))
        expected = f"expected at most {sys.get_int_max_str_digits()}"
        raise ValueError(f"found an integer of {digits} digits, {expected}") from None


def _finite(text: str) -> float:
    """Not NaN and the infinities, which Python reads and JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"found {text[:80]}, expected a finite number")
    return value


class JsonReader:
    """Typed, ranged access to one JSON object with errors that name the file and the key. A key
    whose value is null counts as absent.
    """

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.values = {key: value for key, value in raw.items() if value is not None}
        self.source = source

    def fail(self, key: str, found: Any, expected: str) -> UserError:
        """The error for a key that holds something else."""
        return UserError(f"{self.source}: {key}: found {shorten(found)}, expected {expected}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in a range."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """A number above ``low`` up to ``high``."""
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high:
            raise self.fail(key, value, f"a number above {low} up to {high}")
        return float(value)

    def exactly(self, key: str, expected: Any) -> None:
        """Refuses any other value of a key than the one of this architecture; it may be absent."""
        if key in self.values and self.values[key] != expected:
            raise self.fail(key, self.values[key], repr(expected))

    def child(self, key: str) -> "JsonReader | None":
        """An object inside this one, if the key is there."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, value, "an object")
        return JsonReader(value, f"{self.source}: {key}")
