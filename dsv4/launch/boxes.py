"""Tensors that a kernel copies box by box (TMA)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16
_MOST_DIMENSIONS = 5
_MOST_VALUES = 256
_DTYPES = (torch.bfloat16, torch.int32)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Argument for a parameter of the type ``TensorMap``: boxes of ``box`` values of a tensor whose
    last dimension is contiguous. ``swizzled``: 16-byte piece c of a box's row r of 128 bytes goes
    to place c ^ (r % 8).

    Raises ``ValueError`` for what TMA cannot copy.
    """

    tensor: Tensor
    box: tuple[int, ...]
    swizzled: bool = False

    def __post_init__(self) -> None:
        tensor = self.tensor
        if tensor.dtype not in _DTYPES or tensor.stride(-1) != 1:
            raise ValueError(
                f"boxes: found {tensor.dtype} of strides {tensor.stride()}, expected bfloat16 or "
                "int32 whose last dimension is contiguous"
            )
        if any(stride * tensor.itemsize % _ALIGNMENT for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"boxes: found strides {tensor.stride()}, expected multiples of {_ALIGNMENT} bytes"
            )
        fits = len(self.box) == tensor.dim() <= _MOST_DIMENSIONS
        if not fits or any(not 0 < values <= _MOST_VALUES for values in self.box):
            raise ValueError(
                f"boxes: found a box of {self.box} for {tuple(tensor.shape)}, expected 1 to "
                f"{_MOST_VALUES} values of each of at most {_MOST_DIMENSIONS} dimensions"
            )
        nbytes = self.box[-1] * tensor.itemsize
        if nbytes % _ALIGNMENT or (self.swizzled and nbytes > 128):
            raise ValueError(
                f"boxes: found rows of {nbytes} bytes, expected a multiple of {_ALIGNMENT}, and at "
                "most 128 where they are swizzled"
            )
