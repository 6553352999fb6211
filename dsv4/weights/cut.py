"""A part of a weight along one dimension: codes and scales cut alike, so that it means what it
means in the whole.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from dsv4.weights.quant import FP8_BLOCK, QuantFormat

ROWS = -2
COLUMNS = -1


@dataclass(frozen=True)
class Cut:
    """Elements ``first`` to ``stop`` (without) of ``dimension`` of a logical shape. Dimensions are
    counted from the end, because experts are stacked: ``ROWS`` or ``COLUMNS`` of a matrix,
    ``COLUMNS`` of a vector.
    """

    dimension: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of something of shape ``whole``. Raises ``ValueError`` when it is
        no part of it.
        """
        size = whole[self.dimension]
        if not 0 <= self.first < self.stop <= size:
            found = f"{self.first} to {self.stop}"
            raise ValueError(f"cut: found {found}, expected a part of 0 to {size}")
        cut = list(whole)
        cut[self.dimension] = self.size
        return tuple(cut)

    def narrow(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of this part of ``tensor``."""
        # Bytes: E8M0 has few operations.
        stored = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        part = stored.narrow(self.dimension, self.first, self.size)
        return part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def part_cuts(format: QuantFormat, cut: Cut) -> dict[str, Cut | None]:
    """What ``cut`` of a logical shape is in ``data``, ``block_scale`` and ``global_scale`` of a
    weight of ``format``; None: the whole part.

    Blocks of two parts may be one block of the whole: both have its scale. Raises ``ValueError``
    for a cut through a byte or a block, of which a part of its own would not begin with it.
    """
    cuts: dict[str, Cut | None] = {"data": cut, "block_scale": cut, "global_scale": None}
    group = format.group_size
    if group is not None and cut.dimension == COLUMNS:
        if cut.first % group or cut.stop % group:
            found = f"columns {cut.first} to {cut.stop} of a {format.value} weight"
            raise ValueError(f"cut: found {found}, expected multiples of {group}")
        cuts["data"] = Cut(COLUMNS, cut.first // 2, cut.stop // 2)
        cuts["block_scale"] = Cut(COLUMNS, cut.first // group, cut.stop // group)
    elif format is QuantFormat.FP8_BLOCK128:
        is_inside = cut.first // FP8_BLOCK == (cut.stop - 1) // FP8_BLOCK
        if cut.first % FP8_BLOCK and not is_inside:
            found = f"{cut.first} to {cut.stop} of an {format.value} weight"
            expected = f"a multiple of {FP8_BLOCK} first, or one block of {FP8_BLOCK}"
            raise ValueError(f"cut: found {found}, expected {expected}")
        blocks = Cut(cut.dimension, cut.first // FP8_BLOCK, ceil(cut.stop / FP8_BLOCK))
        cuts["block_scale"] = blocks
    return cuts
