"""What is typed into a chat, or piped into it: entries of one or more lines."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from dsv4.errors import UserError

FENCE = '"""'
# Gives the next line, or several where they were typed as one, behind a text that asks for it.
# Raises EOFError behind the last one.
ReadLine = Callable[[str], str]


def line_reader() -> ReadLine:
    """A line editor with history where stdin is a terminal, else the lines of stdin. Raises
    ``UserError`` where prompt_toolkit is missing.
    """
    if not sys.stdin.isatty():
        return piped_line
    if find_spec("prompt_toolkit") is None:
        raise UserError(
            f"--interactive: {sys.executable} has no prompt_toolkit, expected it for a terminal: "
            "pip install prompt_toolkit"
        )
    # Here, because nothing but a chat at a terminal needs it.
    from dsv4.cli.chat.line_editor import LineEditor

    return LineEditor()


def piped_line(_: str) -> str:
    """The next line of stdin, which is UTF-8. Raises ``UserError`` for one that is not."""
    data = sys.stdin.buffer.readline()
    if not data:
        raise EOFError
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: byte {error.start} of a line is not UTF-8") from None


def read_entry(read_line: ReadLine, prompt: str) -> str:
    """The next entry that is not empty. A fence begins one that goes on to the next fence and is
    never a command: another slash comes before its own.
    """
    while True:
        line = read_line(f"{prompt}> ")
        if line.strip() == FENCE:
            text = "\n".join(fenced_lines(read_line))
            line = f"/{text}" if text.startswith("/") else text
        if line.strip():
            return line


def fenced_lines(read_line: ReadLine) -> list[str]:
    """The lines up to the next fence, or up to the last one. Raises the ``UserError`` of a line
    behind them all: what is left of them would be read as entries.
    """
    lines: list[str] = []
    wrong: UserError | None = None
    while True:
        try:
            line = read_line("... ")
        except EOFError:
            break
        except UserError as error:
            wrong = wrong or error
            continue
        if line.strip() == FENCE:
            break
        lines.append(line)
    if wrong is not None:
        raise wrong
    return lines
