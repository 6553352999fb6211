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
        self._longest = functools.cache(self._find_longest)

    def __call__(self, tokens: int) -> Shape | None:
        return self._shape(tokens)

    def longest(self, most: int) -> Shape | None:
        """The shape for the most tokens up to ``most`` that there is one for; None where there is
        none. Computed once for the launches that are alike.
        """
        return self._longest(most)

    def _find_longest(self, most: int) -> Shape | None:
        if self(most) is not None or self(1) is None:
            return longest_of(self, most)
        # What is there for one token and not for all of them is for fewer than some number.
        least = 1
        beyond = most
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if self(middle) is None:
                beyond = middle
            else:
                least = middle
        return self(least)


def longest_of(shape_of: Callable[[int], Shape | None], most: int) -> Shape | None:
    """The shape for the most tokens up to ``most`` that there is one for."""
    found = (shape_of(tokens) for tokens in range(most, 0, -1))
    return next((shape for shape in found if shape is not None), None)


@functools.cache
def by_tokens(function: Callable[..., Shape | None], *constants: Hashable) -> ShapesByTokens:
    """The shapes ``function(*constants, tokens)``: the same object for equal constants, which must
    not be tensors, nor functions with values of a recording.
    """
    return ShapesByTokens(function, constants)
