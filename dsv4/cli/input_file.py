"""Files that the driver's flags name; ``-`` is stdin."""

import re
import sys
from pathlib import Path
from typing import BinaryIO

from dsv4.errors import UserError

# A thousand for every token of the longest context, many more than any prompt has: a device or a
# pipe without an end would fill the memory.
MAX_INPUT_BYTES = 2**30
_PIECE_BYTES = 2**20
_FINAL_LINE_BREAK = re.compile(r"\r?\n\Z")


def read_input(flag: str, file: str) -> bytes:
    """The bytes of ``file``, which may be a pipe. Raises ``UserError`` that names ``flag``, also
    beyond ``MAX_INPUT_BYTES``.
    """
    try:
        if file == "-":
            data = read_limited(sys.stdin.buffer)
        else:
            with Path(file).open("rb") as opened:
                data = read_limited(opened)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag}: {file}: cannot be read: {reason}") from None
    if len(data) > MAX_INPUT_BYTES:
        found = f"found more than {MAX_INPUT_BYTES} bytes"
        raise UserError(f"{flag}: {file}: {found}, expected an end before")
    return data


def read_limited(file: BinaryIO) -> bytes:
    """The rest of a file, or its first bytes where there are more than ``MAX_INPUT_BYTES``."""
    data = bytearray()
    while len(data) <= MAX_INPUT_BYTES:
        piece = file.read(_PIECE_BYTES)
        data += piece
        # Not read again: a terminal would want its Ctrl-D twice.
        if len(piece) < _PIECE_BYTES:
            break
    return bytes(data)


def read_text(flag: str, file: str) -> str:
    """The UTF-8 text of ``file`` without a byte order mark and the line break (LF or CRLF) that
    editors, ``echo`` and the terminal put at its ends. Raises ``UserError`` that names ``flag``.
    """
    try:
        text = read_input(flag, file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
        raise UserError(f"{flag}: {file}: cannot be read: {problem}") from None
    return _FINAL_LINE_BREAK.sub("", text)
