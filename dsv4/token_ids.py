"""The check of token ids that a caller gives."""

import operator
from collections.abc import Iterable

from dsv4.errors import UserError, shorten


def check_ids(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids as a list. Raises ``UserError`` for no ids and for ids outside the vocabulary."""
    try:
        checked = [operator.index(token) for token in token_ids]
    except TypeError:
        raise UserError(f"token_ids: found {shorten(token_ids)}, expected integers") from None
    if not checked:
        raise UserError("token_ids: found none, expected at least 1")
    for token in checked:
        if not 0 <= token < vocab_size:
            raise UserError(f"token_ids: found {token}, expected ids from 0 to {vocab_size - 1}")
    return checked
