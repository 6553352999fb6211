"""How work tells of its progress."""

from collections.abc import Callable

from dsv4.errors import UserError, shorten

# Called with what is done and with the total.
Progress = Callable[[int, int], None]


def check_functions(**given: object) -> None:
    """Raises ``UserError`` for an argument, by its name, that is neither a function nor None:
    before the work begins, in the middle of which it would be called.
    """
    for name, function in given.items():
        if function is not None and not callable(function):
            raise UserError(f"{name}: found {shorten(function)}, expected a function or None")
