"""Files that the driver's flags name; ``-`` is stdin."""

import re
import sys
from pathlib import Path

from dsv4.errors import UserError

_FINAL_LINE_BREAK = re.compile(r"\r?\n\Z")


def read_input(flag: str, file: str) -> bytes:
    """The bytes of ``file``, which may be a pipe. Raises ``UserError`` that names ``flag``."""
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag}: {file}: cannot be read: {reason}") from None


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
