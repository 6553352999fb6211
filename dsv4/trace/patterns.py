"""The choice of values by pattern."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.layers.values import Wants, value_names

EVERY_VALUE = ("*",)
# In every trace, whatever else is wanted.
ALWAYS = ("token_ids", "positions")


def matching(config: ModelConfig, at: Sequence[str], name: str = "at") -> Wants:
    """Whether a value has a name that one of the shell patterns ``at`` matches.

    Raises ``UserError`` for anything but a list of strings, for no pattern, and for one that
    matches no value of the model; ``name`` is what it calls them.
    """
    is_list = isinstance(at, Collection) and not isinstance(at, str) and bool(at)
    if not is_list or not all(isinstance(pattern, str) for pattern in at):
        raise UserError(f"{name}: found {at!r}, expected at least one pattern in a list of strings")
    names = value_names(config)
    for pattern in at:
        if not any(fnmatchcase(value, pattern) for value in (*names, *ALWAYS)):
            raise UserError(
                f"{name}: {pattern!r} matches no value of this model, "
                f"expected names such as {names[0]!r} or 'layers.*.streams'"
            )
    wanted = frozenset(
        value for value in names if any(fnmatchcase(value, pattern) for pattern in at)
    )
    return wanted.__contains__
