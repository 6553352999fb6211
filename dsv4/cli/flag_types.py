"""What flags are made of: a parser whose errors are one line, and types with their ranges."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from dsv4.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag as a ``UserError`` in one line instead of printing the usage and
    leaving.
    """

    def error(self, message: str) -> NoReturn:
        """Raises ``UserError`` with argparse's message, without its leading word."""
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A flag type: an integer from ``low`` to ``high`` (``None``: unbounded)."""
    expected = f"an integer from {low}" + ("" if high is None else f" to {high}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse


def number(low: float, high: float, low_included: bool = True) -> Callable[[str], float]:
    """A flag type: a finite number from ``low`` (or above it) to ``high``."""
    expected = f"a number {'from' if low_included else 'above'} {low:g}" + (
        f" to {high:g}" if high < math.inf else ""
    )

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if (
            not math.isfinite(value)
            or not low <= value <= high
            or (value == low and not low_included)
        ):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse
