"""The one exception type that means "the user gave us something we cannot use"."""

MAX_SHOWN = 80


class UserError(ValueError):
    """Wrong input from outside: a file, a tensor in a file, a flag or a value.

    The message is one line that names the file, tensor or flag, what was found and what was
    expected. The driver prints it after ``error: `` and exits with code 2; it never shows a
    traceback for it.
    """


def shorten(value: object) -> str:
    """``repr`` for an error message: one line, at most ``MAX_SHOWN`` characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
