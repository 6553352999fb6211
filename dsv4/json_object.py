"""JSON files that must hold one object, with errors that name the file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dsv4.errors import UserError, shorten


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file that must hold an object. Raises ``UserError`` naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return parse_json_object(text, str(path))


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """Parses JSON text that must be an object without repeated keys; ``source`` names it in errors (``UserError``)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
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
