"""The items of a recording: launches of kernels, and calls of other code."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.buffers import storage_key
from dsv4.launch.kernel import Shape
from dsv4.launch.signature import Parameter, Signature

ShapeOf = Callable[[int], Shape | None]
Argument = Tensor | Boxes | int | float | None


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. ``shape_of`` gives its shape for a number of tokens; None: it is
    not launched. ``dense_shape``: in a dense step (``Recording.dense_until``).
    """

    signature: Signature
    shape: Shape
    arguments: Mapping[str, Argument]
    shape_of: ShapeOf | None
    dense_shape: Shape | None

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the kernel reads or writes."""
        return tuple(_tensors(self.arguments.values()))

    @cached_property
    def written_storages(self) -> frozenset[int]:
        """Storage keys of every tensor that the kernel may write."""
        written = self._of(lambda one: not (one.constant or one.names_boxes))
        return frozenset(storage_key(tensor) for tensor in written)

    @property
    def read_early(self) -> list[Tensor]:
        """Every tensor that the kernel reads in front of its wait."""
        return self._of(lambda parameter: parameter.read_early)

    @property
    def settles(self) -> bool:
        """Whether all items in front of it are complete when the next one starts, in any step."""
        dense = self.dense_shape
        return self.shape.settles and dense is not None and dense.settles

    @property
    def differs_if_dense(self) -> bool:
        """Whether a dense step launches it in another way, or not at all."""
        return self.dense_shape is not self.shape

    def _of(self, wanted: Callable[[Parameter], bool]) -> list[Tensor]:
        parameters = self.signature.parameters
        return _tensors(self.arguments.get(one.name) for one in parameters if wanted(one))

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


def _tensors(arguments: Iterable[Argument]) -> list[Tensor]:
    whole = (one.tensor if isinstance(one, Boxes) else one for one in arguments)
    return [one for one in whole if isinstance(one, Tensor)]
