"""The one exception type that means "the user gave us something we cannot use"."""


class UserError(ValueError):
    """Wrong input from outside: a file, a tensor in a file, a flag or a value.

    The message is one line that names the file, tensor or flag, what was found and what was
    expected. The driver prints it after ``error: `` and exits with code 2; it never shows a
    traceback for it.
    """


def shorten(value: object, limit: int = 80) -> str:
    """``repr`` for an error message: one line, at most ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
