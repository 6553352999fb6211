"""Flags: numbers as people write them, and errors in one line."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4.command.flags import OneLineParser, given_flags, integer, number, path
from dsv4.errors import UserError


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("+7", 7), ("007", 7), ("-1", -1)])
def test_integers(text: str, value: int) -> None:
    assert integer(-1)(text) == value


@pytest.mark.parametrize("text", ["٣", "1_000", " 5", "5\n", "5.0", "", "0x10", "９", "1" * 5000])
def test_other_spellings_of_integers_are_refused(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"^found .*, expected an integer"
    ) as found:
        integer(1)(text)
    assert len(str(found.value)) < 150


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), (".5", 0.5), ("1.", 1.0), ("5e-1", 0.5), ("0", 0.0)]
)
def test_numbers(text: str, value: float) -> None:
    assert number(0, 1)(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "٣", "0_1", " 1", "1e999", "2", "-0.1", "", "."])
def test_other_spellings_of_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a number from 0 to 1"):
        number(0, 1)(text)
    if text == "1e999":
        with pytest.raises(argparse.ArgumentTypeError):
            number(0, math.inf)(text)


def test_of_a_range_both_ends_are_taken_and_nothing_beyond() -> None:
    assert [integer(1, 3)(text) for text in "123"] == [1, 2, 3]
    for text in ("0", "4"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"an integer from 1 to 3$"):
            integer(1, 3)(text)
    assert [number(0, 1)(text) for text in ("0", "1")] == [0, 1]


def test_an_end_that_is_not_included_is_refused() -> None:
    above_zero = number(0, math.inf, low_included=False)
    assert above_zero("1e-9") == 1e-9
    with pytest.raises(argparse.ArgumentTypeError, match=r"found '0', expected a number above 0$"):
        above_zero("0")


def test_an_empty_path_is_none() -> None:
    assert path("a") == Path("a")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^found '', expected a path$"):
        path("")


@pytest.fixture
def parser() -> OneLineParser:
    parser = OneLineParser(prog="x")
    parser.add_argument("--count", type=integer(1, 3), default=1)
    parser.add_argument("--also", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--count", "9"], "--count: found '9', expected an integer from 1 to 3 (see --help)"),
        (["--cou", "2"], "unrecognized arguments: --cou 2 (see --help)"),
    ],
)
def test_a_wrong_flag_is_one_line(parser: OneLineParser, flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parser.parse_args(flags)
    assert str(caught.value) == message


def test_given_flags_are_those_that_say_something(parser: OneLineParser) -> None:
    given: Callable[[list[str]], frozenset[str]] = lambda flags: given_flags(  # noqa: E731
        parser, parser.parse_args(flags)
    )
    assert given([]) == given(["--count", "1"]) == frozenset()
    assert given(["--count", "2", "--also"]) == {"count", "also"}
