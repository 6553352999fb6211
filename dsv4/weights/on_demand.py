"""Weights whose values are read, or drawn, each time they are used: a layer's experts need not fit
in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from dsv4.weights.quant import QuantTensor


@dataclass(frozen=True)
class WeightOnDemand:
    """A ``Weight`` without values of its own: ``read(index)`` gives one matrix of a stack as
    stored, ``read(None)`` all of it.

    Nothing that was read is kept, so no more matrices live at once than their user holds.
    """

    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[int | None], QuantTensor]
    index: int | None = None

    def __getitem__(self, index: int) -> "WeightOnDemand":
        """One matrix of a stack, still unread."""
        if self.index is not None or len(self.shape) != 3:
            raise ValueError(f"WeightOnDemand of shape {self.shape} is one matrix, not a stack")
        count, *matrix = self.shape
        return replace(self, shape=tuple(matrix), nbytes=self.nbytes // count, index=index)

    def stored(self) -> QuantTensor:
        """The weight as stored, read now."""
        return self.read(self.index)

    def dequantize(self) -> Tensor:
        """The values as float32 ``[..., N, K]``, read now."""
        return self.stored().dequantize()
