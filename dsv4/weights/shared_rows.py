"""A packed weight whose rows several devices multiply, each a part of them."""

from dataclasses import dataclass, fields, replace
from math import ceil

import torch
from torch import Tensor

from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import FP8_BLOCK, QuantFormat, Weight

# In which the rows of every format can be parted: tiles, padding and blocks of scales.
ROW_UNIT = 128


@dataclass(frozen=True)
class RowShare:
    """The rows of a weight from ``first`` on that a device multiplies."""

    device: torch.device
    first: int
    rows: PackedWeight


@dataclass(frozen=True)
class SharedWeight(PackedWithNative):
    """A weight on the last device of its ``shares``, which together have each of its rows once."""

    shares: tuple[RowShare, ...] = ()

    @classmethod
    def of(cls, weight: PackedWeight, shares: tuple[RowShare, ...]) -> "SharedWeight":
        """The weight with its shares."""
        parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
        return cls(**parts, shares=shares)


def shares_of(weight: Weight) -> tuple[RowShare, ...]:
    """Those of a weight, where it has some."""
    return weight.shares if isinstance(weight, SharedWeight) else ()


def rows_of(weight: PackedWeight, first: int, stop: int) -> PackedWeight:
    """Rows ``first`` to ``stop`` (without) of one matrix, in its memory.

    Raises ``ValueError`` where a row is parted from others of its unit.
    """
    rows = weight.shape[0]
    whole = first % ROW_UNIT == 0 and (stop % ROW_UNIT == 0 or stop == rows)
    if not whole or not 0 <= first < stop <= rows:
        raise ValueError(
            f"rows: found {first} to {stop}, expected multiples of {ROW_UNIT} from 0 to {rows}"
        )
    tiles = slice(first // TILE_ROWS, padded(stop) // TILE_ROWS)
    scale = weight.block_scale
    if scale is not None:
        blocks = slice(first // FP8_BLOCK, ceil(stop / FP8_BLOCK))
        scale = scale[blocks if weight.format is QuantFormat.FP8_BLOCK128 else tiles]
    shape = (stop - first, *weight.shape[1:])
    return PackedWeight(
        weight.data[tiles],
        scale,
        weight.global_scale,
        weight.format,
        shape,
        weight.power_of_two_scales,
    )


def on_device(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """The same bytes on ``device``, where they may lie already; of a weight without memory another
    one without.
    """

    def copied(part: Tensor) -> Tensor:
        return torch.empty_like(part) if part.is_meta else part.to(device)

    scale, total = (
        None if part is None else copied(part) for part in (weight.block_scale, weight.global_scale)
    )
    return replace(weight, data=copied(weight.data), block_scale=scale, global_scale=total)
