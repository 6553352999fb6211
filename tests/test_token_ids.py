"""Checks of integers and ids that a caller gives: what is taken, and what is said of the rest."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.errors import UserError
from dsv4.token_ids import check_ids, check_integer, check_integers, check_room, shared_beginning

LONG = 10**90
SHOWN = f"1{'0' * 76}..."


@pytest.mark.parametrize("form", [int, np.int64, np.array, torch.tensor])
def test_integers_of_every_kind_become_ints(form: Callable[[int], Any]) -> None:
    found = [check_integer("n", form(5), 0), *check_integers("n", [form(5)])]
    assert found == [5, 5]
    assert [type(value) for value in found] == [int, int]


@pytest.mark.parametrize(
    "value",
    [
        *(5.0, "5", None, True, np.True_, np.array([5])),
        *(torch.tensor(True), torch.tensor(5.0), torch.tensor([5])),
    ],
    ids=repr,
)
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=re.escape(f"n: found {value!r}, expected an integer of")):
        check_integer("n", value, 0)
    with pytest.raises(UserError, match=re.escape(f"n: found [{value!r}], expected integers")):
        check_integers("n", [value])  # type: ignore[list-item]


def test_both_ends_of_a_range_belong_to_it() -> None:
    assert [check_integer("n", value, -1, 1) for value in (-1, 0, 1)] == [-1, 0, 1]
    assert check_integer("n", LONG, 7) == LONG
    assert check_integer("n", 0, 0, 0) == 0


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (-2, -1, 1, "found -2, expected an integer from -1 to 1"),
        (2, -1, 1, "found 2, expected an integer from -1 to 1"),
        (1, 0, 0, "found 1, expected an integer from 0 to 0"),
        (6, 7, None, "found 6, expected an integer of at least 7"),
        (LONG, 0, 8, f"found {SHOWN}, expected an integer from 0 to 8"),
        ("x", 7, None, "found 'x', expected an integer of at least 7"),
    ],
)
def test_an_integer_outside_is_refused_with_both_ends(
    value: object, low: int, high: int | None, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_integer("n", value, low, high)
    assert str(caught.value) == f"n: {expected}"
    # The command line prints what an error was raised from.
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("ids", "least", "expected"),
    [
        ([], 1, "found none, expected at least 1"),
        ([3], 2, "found none, expected at least 2"),
        ([-1], 1, "found -1, expected ids from 0 to 88"),
        ([89], 1, "found 89, expected ids from 0 to 88"),
        ([3, LONG], 1, f"found {SHOWN}, expected ids from 0 to 88"),
        ("x" * 90, 1, f"found '{'x' * 76}..., expected integers"),
        ({7}, 1, "found the set {7}, expected integers in order"),
    ],
)
def test_ids_that_are_not_of_the_model_are_refused(ids: Any, least: int, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_ids(ids, 89, "stops", least)
    assert str(caught.value) == f"stops: {expected}"


def test_one_id_of_the_vocabulary_is_enough_and_none_only_where_that_is_said() -> None:
    assert check_ids(iter((0, 88)), 89) == [0, 88]
    assert check_ids([], 89, at_least=0) == []
    with pytest.raises(UserError, match="token_ids: found none, expected at least 1"):
        check_ids([], 89)


def test_a_sequence_may_fill_the_context() -> None:
    check_room(64, 64)
    with pytest.raises(UserError, match=r"a sequence of 65 tokens, expected at most 64$"):
        check_room(65, 64)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [([], [3], 0), ([3, 4], [3, 5, 4], 1), ([3, 4], [3, 4, 5], 2), ([4, 3], [3, 3], 0)],
)
def test_the_shared_beginning_ends_at_the_first_difference(
    first: list[int], second: list[int], shared: int
) -> None:
    # Equal ids of a real vocabulary are different objects.
    distinct = [int(f"{token}000") for token in second]
    assert shared_beginning([1000 * token for token in first], distinct) == shared
    assert shared_beginning(second, first) == shared
