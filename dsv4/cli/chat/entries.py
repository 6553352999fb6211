"""What is typed into a chat, or piped into it: entries of one or more lines."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO

from dsv4.cli.input_file import MAX_INPUT_BYTES
from dsv4.errors import UserError

FENCE = '"""'
# Gives the next line, or several where they were typed as one, behind a text that asks for it.
# Raises EOFError behind the last one.
ReadLine = Callable[[str], str]


class BrokenLine(UserError):
    """A line that cannot be taken; the next one may be what it is."""


def line_reader() -> ReadLine:
    """A line editor with history where stdin is a terminal, else the lines of stdin. Raises
    ``UserError`` where prompt_toolkit is missing.
    """
    if not sys.stdin.isatty():
        return PipedLines()
    if find_spec("prompt_toolkit") is None:
        raise UserError(
            f"--interactive: {sys.executable} has no prompt_toolkit, expected it for a terminal: "
            "pip install prompt_toolkit"
        )
    # Here, because nothing but a chat at a terminal needs it.
    from dsv4.cli.chat.line_editor import LineEditor

    return LineEditor()


class PipedLines:
    """The lines of stdin, which are UTF-8, behind a byte order mark or not. Raises ``BrokenLine``
    for one that is not, and ``UserError`` for one that may have no end.
    """

    def __init__(self) -> None:
        self._encoding = "utf-8-sig"

    def __call__(self, _: str) -> str:
        data = sys.stdin.buffer.readline(MAX_INPUT_BYTES + 1)
        if not data:
            raise EOFError
        if len(data) > MAX_INPUT_BYTES:
            found = f"found a line of more than {MAX_INPUT_BYTES} bytes"
            raise UserError(f"stdin: {found}, expected an end before")
        try:
            return data.decode(self._encoding).removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise BrokenLine(f"stdin: byte {error.start} of a line is not UTF-8") from None
        finally:
            self._encoding = "utf-8"


def read_entry(read_line: ReadLine, prompt: str) -> str:
    """The next entry that is not empty. A fence begins one that goes on to the next fence and is
    never a command: another slash comes before its own.
    """
    while True:
        line = read_line(f"{prompt}> ")
        if line.strip() == FENCE:
            text = fenced_text(read_line)
            line = f"/{text}" if text.startswith("/") else text
        if line.strip():
            return line


def fenced_text(read_line: ReadLine) -> str:
    """The lines up to the next fence, or up to the last one. Raises the ``BrokenLine`` among
    them behind them all: what is left of them would be read as entries; and ``UserError`` for a
    block that may have no end.
    """
    text = StringIO()
    wrong: BrokenLine | None = None
    while True:
        try:
            line = read_line("... ")
        except EOFError:
            break
        except BrokenLine as error:
            wrong = wrong or error
            continue
        if line.strip() == FENCE:
            break
        if text.tell() + len(line) > MAX_INPUT_BYTES:
            found = f"found a block of more than {MAX_INPUT_BYTES} characters"
            raise UserError(f"stdin: {found}, expected {FENCE} before")
        text.write(f"{line}\n")
    if wrong is not None:
        raise wrong
    return text.getvalue().removesuffix("\n")
