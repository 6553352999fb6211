"""How work tells of its progress."""

from collections.abc import Callable

# Called with what is done and with the total.
Progress = Callable[[int, int], None]
