"""One launch of ``decode_linear``: what it multiplies, and recording it."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.words import NOT_SENT, Arguments, Words
from dsv4.ops.linear.decode_pair import join_products
from dsv4.ops.linear.decode_plan import (
    WARPS,
    LinearPlan,
    ProductShape,
    has_room_for_columns,
    plan_linear,
    plan_share,
)
from dsv4.ops.linear.row_list import FormatRows, ListLaunch, PackedRows
from dsv4.weights.packed import TILE_ROWS, PackedWeight

# log2 of the row tiles per row of FP8 block scales: as stored (128 rows), and in a row list (64
# rows).
_STORED_SCALE_SHIFT = 3
_LIST_SCALE_SHIFT = 2
# What a launch gets that gathers nothing (``gathered_rows.py``).
_NOT_GATHERED: Arguments = {
    "gathered_table": None,
    "gathered_matrices": 0,
    "gathered_tiles0": 0,
    "gathered_tiles1": 0,
    "x_tile": 0,
    "gathered_memory": None,
    "rank_words": 0,
}


class Norm(NamedTuple):
    """The RMS norm of x before a product; none without a weight."""

    weight: Tensor | None = None
    eps: float = 0.0


NO_NORM = Norm()


@dataclass(frozen=True)
class TileShare:
    """The tiles of a rank: of every format as many as of every other rank, from ``first_tiles`` on.
    The last ranks have some in common where the ranks do not divide the tiles.
    """

    tiles: tuple[int, ...]
    first_tiles: tuple[int, ...]

    @classmethod
    def of(cls, tiles: tuple[int, ...], rank: int, ranks: int) -> "TileShare":
        """That of ``rank`` in the tiles of a list."""
        counts = tuple(ceil_div(count, ranks) for count in tiles)
        pairs = zip(tiles, counts, strict=True)
        return cls(counts, tuple(min(rank * own, count - own) for count, own in pairs))


@dataclass(frozen=True)
class Product:
    """What one launch multiplies x with: row tiles of at most two formats, of a list or of the
    groups of one matrix.

    ``table``: of a list (``ListLaunch``). None: one matrix with ``rows`` rows per group.
    ``global_scale`` float32 per matrix. ``share``: a rank's of the tiles; None: all of them.
    """

    parts: tuple[FormatRows, ...]
    shape: ProductShape
    scale_shift: int
    global_scale: Tensor | None
    table: Tensor | None = None
    rows: int = 0
    float32_out: bool = False
    share: TileShare | None = None

    @classmethod
    def of_matrix(cls, weight: PackedWeight, groups: int, dtype: torch.dtype) -> "Product":
        """With one matrix, or with each of its ``groups`` groups of rows."""
        rows = weight.shape[0] // groups
        # Groups that do not begin on a tile boundary compute the tiles they share with a neighbour,
        # and write their rows.
        tiles = ceil_div(rows, TILE_ROWS) + (1 if groups > 1 and rows % TILE_ROWS else 0)
        part = FormatRows(weight.format, weight.data, weight.block_scale)
        return cls(
            (part,),
            ProductShape((weight.format,), (tiles,), weight.shape[1], groups),
            _STORED_SCALE_SHIFT,
            weight.global_scale,
            rows=rows,
            float32_out=dtype == torch.float32,
        )

    @classmethod
    def of_list(cls, rows: PackedRows, launch: ListLaunch, recording: Recording) -> "Product":
        """Where blocks have all of K, they multiply what serves the indexer's choice behind the
        rest, so that dense steps leave it out.
        """
        shape = rows.shape_of(launch)
        if not has_room_for_columns(shape, recording.tokens, recording.target):
            shape = launch.shape
        return cls(launch.parts, shape, _LIST_SCALE_SHIFT, launch.global_scale, launch.table)

    def shared(self, share: TileShare) -> "Product":
        """With the tiles of a rank alone."""
        return replace(self, shape=self.shape._replace(tiles=share.tiles), share=share)

    def plan(self, tokens: int, target: Target) -> LinearPlan:
        """How the launch splits it."""
        plan_of = plan_linear if self.share is None else plan_share
        return plan_of(self.shape, tokens, target)

    def arguments(self, plan: LinearPlan) -> Arguments:
        """Those of ``decode_linear`` that describe the product."""
        first = self.parts[0]
        second = self.parts[1] if len(self.parts) > 1 else None
        first_tiles = (*self.share.first_tiles, 0) if self.share else (0, 0)
        return {
            "columns": self.shape.columns,
            "slice_columns": plan.slice_columns,
            "data0": first.data,
            "scale0": first.block_scale,
            "tiles0": self.shape.tiles[0],
            "clusters0": plan.clusters[0],
            "groups": self.shape.groups,
            "data1": second.data if second else None,
            "scale1": second.block_scale if second else None,
            "tiles1": self.shape.tiles[1] if second else 0,
            "clusters1": plan.clusters[1] if second else 0,
            "scale_shift": self.scale_shift,
            "global_scale": self.global_scale,
            "table": self.table,
            "matrices": 1 if self.table is None else self.table.shape[0],
            "rows": self.rows,
            "float32_out": int(self.float32_out),
            "first_tile0": first_tiles[0],
            "first_tile1": first_tiles[1],
            "listed_tiles": first.tiles,
        }


def record_product(
    recording: Recording,
    product: Product,
    x_TGK: Tensor,
    norm: Norm,
    y: Tensor | None,
    words: Words = NOT_SENT,
) -> None:
    """The launch of a product, whose result goes to ``y`` or out as ``words``; with the one before
    it where both can be one.
    """
    tokens, groups, _ = x_TGK.shape
    check_tokens(tokens)
    plan = product.plan(tokens, recording.target)
    formats = [FORMAT_CODE[part.format] for part in product.parts]
    has_norm = norm.weight is not None
    defines = (
        ("FORMAT0", formats[0]),
        ("FORMAT1", formats[1] if len(formats) > 1 else -1),
        ("FUSED_NORM", int(has_norm)),
        ("ALIGNED_X", int(_is_aligned(x_TGK, norm))),
        *plan.defines,
        *((("SHARES", 1),) if product.share else ()),
        *words.defines,
    )
    shape = Shape(
        Kernel("linear/decode_linear", "decode_linear", defines),
        plan.blocks(groups),
        32 * WARPS,
        plan.shared_bytes,
        plan.cluster,
        {"later_tiles": product.shape.later},
        settles=has_norm,
    )
    recording.launch(
        shape,
        x=x_TGK,
        row_stride=x_TGK.stride(0),
        group_stride=x_TGK.stride(1) if groups > 1 else 0,
        tokens=tokens,
        norm_weight=norm.weight,
        eps=norm.eps,
        y=y,
        **product.arguments(plan),
        x_bytes=plan.activation_bytes,
        partial_bytes=plan.partial_bytes,
        **{**_NOT_GATHERED, **words.arguments},
    )
    if plan.has_later:
        recording.serve_choice(replace(shape, numbers={"later_tiles": 0}))
    join_products(recording)


def list_memory(recording: Recording, rows: PackedRows, tokens: int) -> Tensor:
    """For the products of a list, in words, because a view as float32 needs whole ones."""
    return recording.empty((ceil_div(tokens * rows.bytes_per_token, 4),), torch.float32)


def check_tokens(tokens: int) -> None:
    """Raises ``ValueError`` for more tokens than the kernel takes, and for none."""
    if not 1 <= tokens <= MAX_DECODE_TOKENS:
        raise ValueError(f"x: found {tokens} tokens, expected 1 to {MAX_DECODE_TOKENS}")


def _is_aligned(x_TGK: Tensor, norm: Norm) -> bool:
    """Whether 8 columns of x, and of the norm's weight, are always 16 or 32 aligned bytes."""
    starts = (x_TGK,) if norm.weight is None else (x_TGK, norm.weight)
    steps = (*x_TGK.stride()[:2], x_TGK.shape[2])
    return all(map(is_aligned, starts)) and all(step % 8 == 0 for step in steps)
