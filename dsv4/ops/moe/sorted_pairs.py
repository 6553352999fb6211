"""The (token, slot) pairs of many tokens sorted by expert, and cut into tiles of the grouped
products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.prefill import FEW, LARGE, NARROW, SOME, TILE_TOKENS, WIDE, Tile

# Pairs of an expert on average up to which tiles are small (docs/kernels/moe.md).
_FEW_PAIRS = 16
_SOME_PAIRS = 48
# And from which on they are large, where they may be.
_LARGE_PAIRS = 112
# Threads and warps of moe_sort.cu.
_SORT_THREADS = 1024
_SORT_WARPS = 32


@dataclass(frozen=True)
class Sorted:
    """Pairs (token, slot) in expert order: ``slots`` int32 ``[T·P]`` holds token · P + slot.

    ``tiles`` int32 ``[most, 4]`` {expert, first position, pairs, 0}, of which ``tile_count`` int32
    ``[1]`` are in use.
    """

    slots: Tensor
    tiles: Tensor
    tile_count: Tensor
    cut: "Cut"

    @property
    def per_token(self) -> int:
        """P."""
        return self.cut.per_token

    @property
    def experts(self) -> int:
        """X."""
        return self.cut.experts

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The tensors by the names of a kernel's arguments."""
        return {"slots": self.slots, "tiles": self.tiles, "tile_count": self.tile_count}

    def tiling(self, tokens: int) -> "Tiling":
        """The tiling of the pairs of ``tokens``."""
        return self.cut.tiling(tokens)


# The arguments of ``Sorted`` where rows are in the order of the tokens.
NO_PAIRS: Mapping[str, None] = dict.fromkeys(("slots", "tiles", "tile_count"))


class Cut(NamedTuple):
    """How pairs are cut into tiles, P of every token over X experts: of at most 128 pairs, or
    ``finely``, into small ones where an expert has few on average, and ``coarsely``, into large
    ones where a step is long and an expert has many.
    """

    per_token: int
    experts: int
    finely: bool = False
    coarsely: bool = False

    def tiling(self, tokens: int) -> "Tiling":
        """The tiling of the pairs of ``tokens``; an expert's pairs share no tile with others."""
        pairs = tokens * self.per_token
        average = self.average(tokens)
        tile = Tiling.of_tokens(average).tile
        if self.finely and self.has_few(tokens):
            tile = FEW if average <= _FEW_PAIRS else SOME
        if self.coarsely and average > _LARGE_PAIRS and tokens > TILE_TOKENS:
            tile = LARGE
        return Tiling(pairs // tile.tokens + min(self.experts, pairs), tile)

    def average(self, tokens: int) -> int:
        """The pairs of an expert, rounded up."""
        return ceil_div(tokens * self.per_token, self.experts)

    def has_few(self, tokens: int) -> bool:
        """Whether experts have so few pairs on average that small tiles are faster."""
        return self.average(tokens) <= _SOME_PAIRS

    def most_tiles(self, tokens: int) -> int:
        """Those of any number up to ``tokens``: more of them can be cut into fewer tiles."""
        limits = (_FEW_PAIRS, _SOME_PAIRS, _LARGE_PAIRS)
        last = (pairs * self.experts // self.per_token for pairs in limits)
        counts = (*last, TILE_TOKENS, tokens)
        return max(self.tiling(max(1, min(count, tokens))).most for count in counts)


class Tiling(NamedTuple):
    """How rows are cut into tiles: ``most`` of them can result."""

    most: int
    tile: Tile

    @classmethod
    def of_tokens(cls, tokens: int) -> "Tiling":
        """The tiling of all tokens in their order."""
        tile = WIDE if tokens > TILE_TOKENS // 2 else NARROW
        return cls(ceil_div(tokens, tile.tokens), tile)


def sort_by_expert(
    recording: Recording,
    ids_TP: Tensor,
    experts: int,
    finely: bool = False,
    coarsely: bool = False,
) -> Sorted:
    """The stable order of ids int64 ``[T, P]`` by expert, in tiles of pairs of one (``Cut``)."""
    tokens, per_token = ids_TP.shape
    cut = Cut(per_token, experts, finely, coarsely)
    most = cut.most_tiles(tokens)
    slots = recording.empty((tokens * per_token,), torch.int32)
    tiles = recording.empty((most, 4), torch.int32)
    tile_count = recording.empty((1,), torch.int32)
    recording.launch(
        by_tokens(_sort_shape, cut),
        ids=ids_TP,
        slots=slots,
        tiles=tiles,
        tile_count=tile_count,
        experts=experts,
    )
    return Sorted(slots, tiles, tile_count, cut)


def _sort_shape(cut: Cut, tokens: int) -> Shape:
    pairs = tokens * cut.per_token
    shared_bytes = sort_shared_bytes(pairs, cut.experts)
    kernel = Kernel("moe/moe_sort", "moe_sort")
    numbers = {"count": pairs, "tile": cut.tiling(tokens).tile.tokens}
    return Shape(kernel, 1, _SORT_THREADS, shared_bytes, numbers=numbers)


def sort_shared_bytes(pairs: int, experts: int) -> int:
    """Dynamic shared memory of the sort: tables of experts, and two 16-bit values per pair."""
    return 4 * (experts + 1) * (_SORT_WARPS + 2) + 4 * pairs
