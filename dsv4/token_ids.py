"""Checks of the integers and token ids that a caller gives, and how far two lists of ids agree."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import takewhile

import torch
from torch import Tensor

from dsv4.errors import UserError, shorten


def check_ids(
    token_ids: Iterable[int], vocab_size: int, name: str = "token_ids", at_least: int = 1
) -> list[int]:
    """The ids as a list of ``at_least`` so many. Raises ``UserError`` that begins with ``name``,
    also for ids outside the vocabulary.
    """
    checked = check_integers(name, token_ids)
    if len(checked) < at_least:
        raise UserError(f"{name}: found none, expected at least {at_least}")
    for token in checked:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name}: found {shorten(token)}, expected ids from 0 to {vocab_size - 1}"
            )
    return checked


def check_integers(name: str, values: Iterable[int]) -> list[int]:
    """The values as a list of ints, as ``check_integer`` takes them. Raises ``UserError``, also for
    bytes and mappings, whose elements are integers by accident, and for sets, which have no order.
    """
    if isinstance(values, Set):
        raise UserError(f"{name}: found the set {shorten(values)}, expected integers in order")
    if not isinstance(values, bytes | bytearray | Mapping):
        with suppress(TypeError):
            return [_index(value) for value in values]
    raise UserError(f"{name}: found {shorten(values)}, expected integers")


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int from ``low`` to ``high``; integers of numpy and torch are some, booleans
    and arrays are none.
    Raises ``UserError``.
    """
    expected = (
        f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    )
    try:
        number = _index(value)
    except TypeError:
        raise UserError(f"{name}: found {shorten(value)}, expected {expected}") from None
    if number < low or (high is not None and number > high):
        raise UserError(f"{name}: found {shorten(number)}, expected {expected}")
    return number


def _index(value: object) -> int:
    """Raises ``TypeError`` for booleans and for arrays, although torch takes those of one element
    for a number.
    """
    if isinstance(value, bool):
        raise TypeError("a boolean is no number")
    if isinstance(value, Tensor) and (value.dtype == torch.bool or value.ndim):
        raise TypeError("a boolean or an array is no number")
    return operator.index(value)  # type: ignore[arg-type]


def check_room(tokens: int, max_context: int) -> None:
    """Raises ``UserError`` for a sequence of more tokens than the context holds."""
    if tokens > max_context:
        raise UserError(
            f"EngineConfig.max_context: found a sequence of {tokens} tokens, "
            f"expected at most {max_context}"
        )


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
