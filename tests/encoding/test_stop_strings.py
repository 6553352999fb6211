"""Stop strings: found across pieces, and nothing of them is let out."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import StopStrings


def shown(pieces: list[str], *stops: str) -> tuple[str, str | None]:
    """The text that comes out, and the string that ended it."""
    text = StopStrings(stops)
    return "".join([*map(text.push, pieces), text.finish()]), text.found


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ("two",), ("one ", "two")),
        ("one two three", ("four",), ("one two three", None)),
        ("one two", (), ("one two", None)),
        ("two one", ("two",), ("", "two")),
        ("aaab", ("aab",), ("a", "aab")),
        ("abcabd", ("abd",), ("abc", "abd")),
        ("ab", ("abc",), ("ab", None)),
        ("xabcd", ("bc", "abcd"), ("xa", "bc")),
        ("xabc", ("c", "bc", "abc"), ("x", "abc")),
        ("a\n\nb\n\n", ("\n\n",), ("a", "\n\n")),
        ("Grüße 漢字!", ("漢字",), ("Grüße ", "漢字")),
    ],
)
def test_every_split_of_the_text_gives_the_same(
    text: str, stops: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        first, second = cuts
        pieces = [text[:first], text[first:second], text[second:]]
        assert shown(pieces, *stops) == expected
    assert shown(list(text), *stops) == expected


def test_a_possible_beginning_is_held_back_and_then_let_out() -> None:
    text = StopStrings(["END."])
    assert [text.push(piece) for piece in ("an E", "N", "D", "!", "EN")] == [
        "an ",
        "",
        "",
        "END!",
        "",
    ]
    assert (text.finish(), text.found) == ("EN", None)


def test_what_was_held_back_is_let_out_once() -> None:
    text = StopStrings(["END."])
    text.push("EN")
    assert [text.finish(), text.finish()] == ["EN", ""]


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([]).push("text") == "text"


def test_stop_strings_may_be_any_iterable() -> None:
    text = StopStrings(iter(["b"]))
    assert (text.push("abc"), text.found) == ("a", "b")


def test_nothing_comes_behind_a_stop_string() -> None:
    text = StopStrings(["b"])
    assert [text.push("abc"), text.push("abc"), text.finish()] == ["a", "", ""]


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings(["a", ""])


@pytest.mark.parametrize("stops", ["stop", b"stop", None, 5])
def test_a_lone_string_is_not_taken_for_its_characters(stops: Any) -> None:
    expected = f"stops is {type(stops).__name__}, expected a list of strings"
    with pytest.raises(ValueError, match=expected):
        StopStrings(stops)


def test_a_stop_that_is_no_string_is_refused_before_any_text() -> None:
    stops: Any = ["a", 5]
    with pytest.raises(ValueError, match="stop is int, expected a string"):
        StopStrings(stops)


letters = st.text("ab", max_size=12)


@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    found, stop = shown(pieces, *stops)
    assert (found, stop) == shown([whole], *stops)
    assert whole.startswith(found)
    assert not any(one in found for one in stops)
    assert (stop is None) == (not any(one in whole for one in stops))
