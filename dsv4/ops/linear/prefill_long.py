"""Products of long steps on Hopper, whose operands TMA copies (``prefill_long_sm90.cu``). Shorter
steps, and what it does not take, are recorded as ``dsv4.ops.linear.prefill`` does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.boxes import Boxes
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.prefill import (
    LARGE,
    MODE_LINEAR,
    STAGE_BYTES,
    TILE_TOKENS,
    Build,
    Results,
    Split,
    Tile,
    build,
    linear_batches,
    scale_arguments,
)
from dsv4.ops.linear.prefill_products import PrefillProducts
from dsv4.ops.linear.row_list import FormatRows
from dsv4.weights.packed import PADDING, TILE_ROWS, PackedWeight, padded
from dsv4.weights.quant import QuantFormat

# Tiles of a dense product: the larger one costs less for a token, the smaller one leaves fewer
# multiprocessors without work.
HALF = LARGE._replace(tokens=TILE_TOKENS)
_TILES = (LARGE, HALF)
# What HALF takes of the time of LARGE (docs/kernels/linear.md).
_HALF_TIME = 0.65
_HALF_TIME_FP8 = 0.7
# Results on their way, of a warp (RESULT_BYTES of prefill_lines.cuh).
_RESULT_BYTES = 2 << 10
# Rows of a warpgroup, which are written together, and of a block.
_ROWS_MULTIPLE = 64
_LINE_BYTES = 512
_SOURCE = "linear/prefill_long_sm90"


def takes_boxes(recording: Recording, x: Tensor) -> bool:
    """Whether TMA may copy x ``[T, …, K]``."""
    on_hopper = recording.target.architecture == "sm_90a"
    return on_hopper and all(stride % 8 == 0 for stride in x.stride()[:-1])


def one_group(x_TK: Tensor) -> Tensor:
    """x as ``[T, 1, K]`` whose strides are all those of rows, at multiples of 16 bytes: TMA takes
    no others, even where there is one group.
    """
    tokens, columns = x_TK.shape
    step = x_TK.stride(0)
    return x_TK.as_strided((tokens, 1, columns), (step, step, 1), x_TK.storage_offset())


class LongForm(NamedTuple):
    """The variants of a product for some tiles. All copy the same boxes: so many tokens, and row
    tiles of a matrix, as divide those of every tile.
    """

    builds: tuple[tuple[Tile, Build], ...]
    box_tokens: int
    box_tiles: int

    @classmethod
    def of(
        cls,
        format: QuantFormat,
        mode: int,
        rows: int,
        tiles: Sequence[Tile],
        results: Results = Results.ROUNDED,
    ) -> "LongForm":
        """Those for weights of a format and so many rows."""
        fitting = [tile.fitting(mode, rows) for tile in tiles]
        box_tokens = math.gcd(*(tile.tokens for tile in tiles))
        box_tiles = math.gcd(*(tile.rows(mode) // TILE_ROWS for tile in fitting))
        boxes = (("BOX_TOKENS", box_tokens), ("BOX_TILES", box_tiles))
        builds = [
            build(_SOURCE, format, mode, results, tile, tile.consumers * _RESULT_BYTES, boxes)
            for tile in fitting
        ]
        return cls(tuple(zip(tiles, builds, strict=True)), box_tokens, box_tiles)

    def token_boxes(self, x_TGK: Tensor) -> Boxes:
        """Of x: the columns of a stage."""
        return Boxes(x_TGK, (self.box_tokens, 1, PADDING), swizzled=True)

    def matrix_boxes(self, weight: PackedWeight | FormatRows, name: str) -> dict[str, Boxes]:
        """Data and block scales of a matrix, a stack or the matrices of a list by the names of a
        kernel's arguments. The data again for scales that are not in boxes.
        """
        stage = STAGE_BYTES[weight.format]
        data = _words(weight.data)
        boxes = Boxes(data, (self.box_tiles, stage.weight // _LINE_BYTES, data.shape[-1]))
        scale_boxes = boxes
        if stage.scale:
            assert weight.block_scale is not None
            scales = _words(weight.block_scale)
            scale_boxes = Boxes(scales, (self.box_tiles, 1, scales.shape[-1]))
        return {name: boxes, f"{name}_scale": scale_boxes}


def dense_form(format: QuantFormat, rows: int, results: Results) -> LongForm:
    """That of a dense product."""
    return LongForm.of(format, MODE_LINEAR, rows, _TILES, results)


def linear_batches_long(
    recording: Recording, x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype
) -> Tensor:
    """``dsv4.ops.linear.prefill_products.Batches``: of long steps by TMA."""
    x_TGK = aligned_rows(recording, x_TGK)
    _, groups, columns = x_TGK.shape
    rows = weight.shape[0] // groups
    whole_rows = rows % (_ROWS_MULTIPLE if groups == 1 else LARGE.rows(MODE_LINEAR)) == 0
    long_from = Split.of(recording.target, MODE_LINEAR, rows, columns, groups).long_from
    if not (takes_boxes(recording, x_TGK) and whole_rows) or recording.tokens < long_from:
        return linear_batches(recording, x_TGK, weight, out_dtype)
    y_TGR = linear_batches(recording, x_TGK, weight, out_dtype, fewer_than=long_from)
    form = dense_form(weight.format, rows, Results(out_dtype))
    row_blocks = ceil_div(rows, LARGE.rows(MODE_LINEAR)) * groups
    fastest = Fastest(weight.format, row_blocks, recording.target.multiprocessors)
    recording.launch(
        by_tokens(long_shape, "long_linear", form, fastest, long_from),
        x=form.token_boxes(x_TGK),
        **form.matrix_boxes(weight, "weight"),
        **scale_arguments(weight, "weight"),
        y=y_TGR,
        rows=rows,
        columns=columns,
        row_tiles=padded(weight.shape[0]) // TILE_ROWS,
        y_stride=y_TGR.stride(0),
        batches=groups,
    )
    return y_TGR


class Fastest(NamedTuple):
    """What the tile follows from with which a product takes the least time. ``row_blocks``: of all
    groups.
    """

    format: QuantFormat
    row_blocks: int
    multiprocessors: int

    def tile(self, tokens: int) -> Tile:
        """The tile for so many tokens."""
        half_time = _HALF_TIME_FP8 if self.format is QuantFormat.FP8_BLOCK128 else _HALF_TIME
        tiles = [self.tiles(tile, tokens) for tile in _TILES]
        whole, half = (ceil_div(count, self.multiprocessors) for count in tiles)
        return HALF if half * half_time < whole else LARGE

    def tiles(self, tile: Tile, tokens: int) -> int:
        """How many tiles there are."""
        return self.row_blocks * ceil_div(tokens, tile.tokens)


def long_shape(
    function: str, form: LongForm, fastest: Fastest, long_from: int, tokens: int
) -> Shape | None:
    """The launch of a product of so many tokens, of ``long_from`` on."""
    if tokens < long_from:
        return None
    tile = fastest.tile(tokens)
    blocks = min(fastest.tiles(tile, tokens), fastest.multiprocessors)
    return dict(form.builds)[tile].shape(function, blocks, tokens=tokens)


def _words(stored: Tensor) -> Tensor:
    """uint8 ``[..., tiles, chunks, A, B]`` as int32 ``[… · tiles, chunks, A · B / 4]``."""
    return stored.flatten(-2).view(torch.int32).flatten(0, -3)


_PRODUCTS = PrefillProducts(linear_batches_long)
linear = _PRODUCTS.linear
grouped_linear = _PRODUCTS.grouped_linear
linear_rows = _PRODUCTS.linear_rows
