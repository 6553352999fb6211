"""Some tokens of a long chunk as a recording of their own."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from dsv4.launch.items import Argument, ShapeOf
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import ShapesByTokens, by_tokens


class TokenPart(Recording):
    """At most ``most`` tokens of another recording, from the token ``start`` on.

    Whatever is recorded here goes to the other one, with shapes for the tokens of the part; a step
    that ends before ``start`` leaves it out. Tensors are given and made for the part alone.
    """

    def __init__(self, whole: Recording, start: int, most: int) -> None:
        super().__init__(whole.target, min(most, whole.tokens - start), whole.nan_1, whole.peers)
        self.items = whole.items
        self.kept = whole.kept
        self._buffers = whole._buffers
        self._zeroed = whole._zeroed
        self.placed = whole.placed
        self._settled = whole._settled
        self._whole = whole
        self._start = start
        self._most = most

    def launch(self, shape: Shape | ShapeOf, **arguments: Argument) -> None:
        """As ``Recording.launch``; a function for ``shape`` is asked for the tokens of the part."""
        part = shape, self._start, self._most
        shared = isinstance(shape, ShapesByTokens)
        shape_of = by_tokens(_part_shape, *part) if shared else partial(_part_shape, *part)
        self._whole.launch(shape_of, **arguments)

    def call(self, function: Callable[..., object], *tensors: Tensor) -> None:
        """As ``Recording.call``; ``function`` gets the tokens of the part."""

        def of_part(tokens: int, *memory: Tensor) -> None:
            if tokens > self._start:
                function(min(tokens - self._start, self._most), *memory)

        self._whole.call(of_part, *tensors)


def _part_shape(shape: Shape | ShapeOf, start: int, most: int, tokens: int) -> Shape | None:
    if tokens <= start:
        return None
    return shape if isinstance(shape, Shape) else shape(min(tokens - start, most))
