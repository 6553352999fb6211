"""JSON text to values, with errors in the words of who wrote it."""

import json
import math
import sys


def parse_json(text: str | bytes) -> object:
    """The value of JSON text. ValueError, also for repeated keys and for numbers that are not
    finite.
    """
    try:
        if isinstance(text, str) and text.startswith("\ufeff"):
            raise ValueError("found a byte order mark, expected none")
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=parse_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error


def parse_integer(text: str) -> int:
    """An integer of JSON. ValueError for one of more digits than Python reads, whose own advice is
    for programmers.
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


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for key, found in pairs:
        if key in value:
            raise ValueError(f"the key {key[:80]!r} occurs twice")
        value[key] = found
    return value
