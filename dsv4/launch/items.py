"""The items of a recording: launches of kernels, and calls of other code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from dsv4.launch.kernel import Shape
from dsv4.launch.signature import Signature

ShapeOf = Callable[[int], Shape | None]


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. ``shape_of`` gives its shape for a number of tokens; None: it is
    not launched. ``dense_shape``: in a dense step (``Recording.dense_until``).
    """

    signature: Signature
    shape: Shape
    arguments: Mapping[str, Tensor | int | float | None]
    shape_of: ShapeOf | None
    dense_shape: Shape | None

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that the kernel reads or writes."""
        return [argument for argument in self.arguments.values() if isinstance(argument, Tensor)]

    @property
    def differs_if_dense(self) -> bool:
        """Whether a dense step launches it in another way, or not at all."""
        return self.dense_shape is not self.shape

    def shape_for(self, tokens: int, dense: bool) -> Shape | None:
        """How it is launched in a step of ``tokens`` tokens; None: it is not."""
        if self.shape_of is not None:
            return self.shape_of(tokens)
        return self.dense_shape if dense else self.shape


@dataclass(frozen=True)
class Call:
    """``function(tokens, *tensors)`` on the tensors' memory, queued on the current stream like a
    launch.
    """

    function: Callable[..., object]
    tensors: list[Tensor]


Item = Launch | Call
