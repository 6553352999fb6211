"""A prompt as token ids: a file with a JSON array, or with numbers between spaces or commas."""

import json
import re

from dsv4.cli.input_file import read_input
from dsv4.errors import UserError, shorten
from dsv4.json_object import parse_integer

_NUMBER = re.compile(r"[0-9]+")
_BETWEEN = re.compile(r"\s*,\s*|\s+")


def read_token_ids(file: str, vocab_size: int) -> list[int]:
    """The ids in ``file`` (``-``: stdin). Raises ``UserError`` for a file that cannot be read, for
    no ids, and for the first one that is not an integer below ``vocab_size``.
    """
    found = parse_token_ids(read_input("--token-ids", file), file)
    if not found:
        raise UserError(f"--token-ids: {file}: found no token ids, expected at least 1")
    for place, token in enumerate(found):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UserError(
                f"--token-ids: {file}: found {shorten(token)} at index {place}, "
                f"expected token ids from 0 to {vocab_size - 1}"
            )
    return found


def parse_token_ids(raw: bytes, file: str) -> list:
    """The items of a JSON array or of a plain list; one that is no number stays what it is. Raises
    ``UserError`` for anything else.
    """
    try:
        text = raw.decode("utf-8-sig").strip()
        if not text.startswith("["):
            items = _BETWEEN.split(text.strip(",")) if text else []
            return [parse_integer(item) if _NUMBER.fullmatch(item) else item for item in items]
        return json.loads(text, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--token-ids: {file}: not a list of token ids ({problem})") from None
