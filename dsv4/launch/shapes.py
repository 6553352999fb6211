"""Shapes of launches by the number of tokens, computed once for all launches that are alike.

The launches of every layer and of every rank have the same shapes, and a prompt of another length
asks each of them anew.
"""

import functools
from collections.abc import Callable, Hashable

from dsv4.launch.kernel import Shape

# Lengths of steps that are remembered: of a prompt, that of its chunks and of its last one.
_LENGTHS = 4


class ShapesByTokens:
    """``function(*constants, tokens)`` by tokens."""

    def __init__(self, function: Callable[..., Shape | None], constants: tuple[Hashable, ...]):
        self._shape = functools.lru_cache(_LENGTHS)(functools.partial(function, *constants))

    def __call__(self, tokens: int) -> Shape | None:
        return self._shape(tokens)


@functools.cache
def by_tokens(function: Callable[..., Shape | None], *constants: Hashable) -> ShapesByTokens:
    """The shapes ``function(*constants, tokens)``: the same object for equal constants, which must
    not be tensors, nor functions with values of a recording.
    """
    return ShapesByTokens(function, constants)
