"""Products of long steps on Hopper, whose operands TMA copies (``prefill_long_sm90.cu``). Shorter
steps, and what it does not take, are recorded as ``dsv4.ops.linear.prefill`` does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.kernel import Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.prefill import (
    LARGE,
    LONG_TOKENS,
    MODE_GATE_UP,
    MODE_LINEAR,
    STAGE_BYTES,
    TILE_TOKENS,
    Build,
    Split,
    Tile,
    build,
    linear_batches,
    scale_arguments,
)
from dsv4.ops.linear.prefill_products import PrefillProducts
from dsv4.weights.packed import PADDING, TILE_ROWS, PackedWeight, padded
from dsv4.weights.quant import QuantFormat

# Tiles of a dense product: the larger one costs less for a token, the smaller one leaves fewer
# multiprocessors without work.
HALF = LARGE._replace(tokens=TILE_TOKENS)
_TILES = (LARGE, HALF)
# What HALF takes of the time of LARGE (docs/kernels/linear.md).
_HALF_TIME = 0.65
_HALF_TIME_FP8 = 0.7
# Results on their way (RESULT_BYTES of prefill_lines.cuh).
_RESULT_BYTES = 16 << 10
# Rows of a warpgroup, which are written together, and of a block.
_ROWS_MULTIPLE = 64
_LINE_BYTES = 512
# Row tiles of a box (BOX_TILES).
_BOX_TILES = 8
_GATE_UP_BOX_TILES = 4


def takes_boxes(recording: Recording, x: Tensor) -> bool:
    """Whether long steps of this recording have TMA copy x ``[T, …, K]``."""
    return (
        recording.target.architecture == "sm_90a"
        and recording.tokens >= LONG_TOKENS
        and all(stride % 8 == 0 for stride in x.stride()[:-1])
    )


def long_build(format: QuantFormat, mode: int, tile: Tile, out_float: bool = False) -> Build:
    """The variant for a weight format, a mode and a tile."""
    source = "linear/prefill_long_sm90"
    return build(source, format, mode, out_float, tile, _RESULT_BYTES)


def token_boxes(x_TGK: Tensor) -> Boxes:
    """128 tokens and the columns of a stage."""
    return Boxes(x_TGK, (TILE_TOKENS, 1, PADDING), swizzled=True)


def matrix_boxes(weight: PackedWeight, name: str, mode: int) -> dict[str, Boxes]:
    """Data and block scales of a matrix or a stack by the names of a kernel's arguments. The data
    again for scales that are not in boxes.
    """
    row_tiles = _GATE_UP_BOX_TILES if mode == MODE_GATE_UP else _BOX_TILES
    stage = STAGE_BYTES[weight.format]
    data = _words(weight.data)
    boxes = Boxes(data, (row_tiles, stage.weight // _LINE_BYTES, data.shape[-1]))
    scale_boxes = boxes
    if stage.scale:
        assert weight.block_scale is not None
        scales = _words(weight.block_scale)
        scale_boxes = Boxes(scales, (row_tiles, 1, scales.shape[-1]))
    return {name: boxes, f"{name}_scale": scale_boxes}


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
    out_float = out_dtype == torch.float32
    variants = {tile: long_build(weight.format, MODE_LINEAR, tile, out_float) for tile in _TILES}
    row_blocks = ceil_div(rows, LARGE.rows(MODE_LINEAR)) * groups
    fastest = Fastest(weight.format, row_blocks, recording.target.multiprocessors)
    recording.launch(
        by_tokens(_shape, tuple(variants.items()), fastest, long_from),
        x=token_boxes(x_TGK),
        **matrix_boxes(weight, "weight", MODE_LINEAR),
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
        whole, half = (ceil_div(self.tiles(tile, tokens), self.multiprocessors) for tile in _TILES)
        return HALF if half * half_time < whole else LARGE

    def tiles(self, tile: Tile, tokens: int) -> int:
        """How many tiles there are."""
        return self.row_blocks * ceil_div(tokens, tile.tokens)


def _shape(
    variants: tuple[tuple[Tile, Build], ...], fastest: Fastest, long_from: int, tokens: int
) -> Shape | None:
    if tokens < long_from:
        return None
    tile = fastest.tile(tokens)
    blocks = min(fastest.tiles(tile, tokens), fastest.multiprocessors)
    return dict(variants)[tile].shape("long_linear", blocks, tokens=tokens)


def _words(stored: Tensor) -> Tensor:
    """uint8 ``[..., tiles, chunks, A, B]`` as int32 ``[… · tiles, chunks, A · B / 4]``."""
    return stored.flatten(-2).view(torch.int32).flatten(0, -3)


_PRODUCTS = PrefillProducts(linear_batches_long)
linear = _PRODUCTS.linear
grouped_linear = _PRODUCTS.grouped_linear
linear_rows = _PRODUCTS.linear_rows
