"""Flags: a parser that says in one line what is wrong, and types with ranges."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dsv4.command.streams import show, silence_stdout
from dsv4.engine_config import ACTIVATION_MODES, PARALLEL
from dsv4.errors import UserError, shorten

# What int() and float() accept beyond these (underscores, spaces, digits of other scripts) is more
# likely a slip than a number.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,100}\.?[0-9]{0,100}|\.[0-9]{1,100})([eE][+-]?[0-9]{1,3})?")


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag as a ``UserError`` in one line instead of printing the usage and
    leaving. Flags cannot be abbreviated.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raises ``UserError`` with argparse's message, without its leading word."""
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")

    def _print_message(self, message: str, file: object = None) -> None:
        """What --help and --version print. Raises ``OSError`` that names stdout: argparse would
        leave with 0 though nothing was written. A reader that leaves has seen enough.
        """
        try:
            show(message)
        except BrokenPipeError:
            silence_stdout()


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A flag type: an integer from ``low`` to ``high`` (``None``: unbounded), in ASCII digits."""
    expected = f"an integer from {low}" + ("" if high is None else f" to {high}")

    def parse(text: str) -> int:
        value = int(text) if _INTEGER.fullmatch(text) else None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"found {shorten(text)}, expected {expected}")
        return value

    return parse


def number(low: float, high: float, low_included: bool = True) -> Callable[[str], float]:
    """A flag type: a finite number from ``low`` (or above it) to ``high``."""
    expected = f"a number {'from' if low_included else 'above'} {low:g}" + (
        f" to {high:g}" if high < math.inf else ""
    )

    def parse(text: str) -> float:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if (
            not math.isfinite(value)
            or not low <= value <= high
            or (value == low and not low_included)
        ):
            raise argparse.ArgumentTypeError(f"found {shorten(text)}, expected {expected}")
        return value

    return parse


def path(text: str) -> Path:
    """A flag type: a path that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("found '', expected a path")
    return Path(text)


def flag_name(name: str) -> str:
    """``--top-p`` of the argument ``top_p``."""
    return "--" + name.replace("_", "-")


def add_prefill_activations(parser: argparse._ActionsContainer) -> None:
    """``--prefill-activations``, which every command that loads an engine has."""
    parser.add_argument(
        "--prefill-activations",
        choices=ACTIVATION_MODES,
        default="bf16",
        help="what quantised weights are multiplied with in a prompt; fp8, nvfp4: rounded to 8, or "
        "for NVFP4 weights 4 bit (default: bf16)",
    )


def add_parallel(parser: argparse._ActionsContainer) -> None:
    """``--parallel`` beside a command's ``--gpus``."""
    parser.add_argument(
        "--parallel", choices=PARALLEL, default="pipeline", help="(default: pipeline)"
    )


def given_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> frozenset[str]:
    """Destinations of the flags whose value is not the default, which is how a flag that would
    have no effect is noticed.
    """
    values = vars(arguments)
    return frozenset(name for name in values if values[name] != parser.get_default(name))
