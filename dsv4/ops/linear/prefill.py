"""Weight-only products of many tokens (more than a decode step): one GEMM that decodes weights in
registers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.launch.target import Target
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.prefill_products import PrefillProducts
from dsv4.weights.packed import PADDING, TILE_ROWS, PackedWeight, padded
from dsv4.weights.quant import QuantFormat

# Constants of dsv4/ops/linear/prefill_tiles.cuh.
TILE_TOKENS = 128
MODE_LINEAR, MODE_GATE_UP, MODE_DOWN = range(3)
_PRODUCERS = 4
_FEWEST_CONSUMERS = 8
# What 12 consumers gain over 8 (docs/kernels/moe.md).
_GAIN_OF_CONSUMERS = 0.06
# A stage has 64 columns (128 bytes) of x. A block also holds the stages' alignment, barriers and a
# flag.
_TOKEN_BYTES = 128
_OTHER_SHARED = 2048
_SHARED_LIMIT = 227 << 10
# 5 stages were 0.4 % slower than 8 (docs/kernels/linear.md); the barriers have room for more.
_MAX_STAGES = 8
# A split has at least 4 stages, so that its pipeline fills. Each of 16 splits stores eight of a
# tile's tokens.
_MIN_SPLIT_STEPS = 4
_MAX_SPLITS = 16
# By so many splits a product is faster than by the whole tiles of ``prefill_long``.
_FAST_SPLITS = 4
# From here on steps have such tiles, for whatever has them.
LONG_TOKENS = TILE_TOKENS + 1
NO_SPLITS: Mapping[str, None] = dict.fromkeys(("parts", "counters"))
# A split tile has one counter: they are at most half as many as there are multiprocessors.
_COUNTERS = 1024


class StageBytes(NamedTuple):
    """Bytes of 16 rows and 64 columns."""

    weight: int
    scale: int


STAGE_BYTES = {
    QuantFormat.NVFP4: StageBytes(512, 64),
    QuantFormat.MXFP4: StageBytes(512, 32),
    QuantFormat.FP8_BLOCK128: StageBytes(1024, 0),
    QuantFormat.BF16: StageBytes(2048, 0),
}


class Tile(NamedTuple):
    """What a block computes at a time: rows of the weights, for at most ``tokens``.

    ``consumers``: warps, which multiply ``sides`` row tiles each. ``wide``: it holds about 100
    tokens on average.
    """

    tokens: int
    consumers: int
    wide: bool = False
    sides: int = 2

    def rows(self, mode: int) -> int:
        """Those of the result (ROWS_PER_BLOCK); gate and up are of the same ones."""
        return self.consumers * TILE_ROWS * self.sides // (2 if mode == MODE_GATE_UP else 1)

    def fitting(self, mode: int, rows: int) -> "Tile":
        """This one, or one of fewer consumers where a product of so many rows leaves more of its
        last block idle than they gain.
        """
        fewer = self._replace(consumers=_FEWEST_CONSUMERS)
        idle = round_up(rows, self.rows(mode)) / round_up(rows, fewer.rows(mode)) - 1
        return fewer if idle > _GAIN_OF_CONSUMERS else self


FEW = Tile(32, 12)
SOME = Tile(64, 12)
NARROW = Tile(TILE_TOKENS, _FEWEST_CONSUMERS)
WIDE = Tile(TILE_TOKENS, _FEWEST_CONSUMERS, wide=True)
LARGE = Tile(2 * TILE_TOKENS, _FEWEST_CONSUMERS, sides=1)


class Results(Enum):
    """The dtype of a product in MODE_LINEAR; of a list's matrices each has its own."""

    ROUNDED = torch.bfloat16
    FLOAT = torch.float32
    OF_A_LIST = None


@dataclass(frozen=True)
class Build:
    """One compiled variant of the GEMM and what its launch needs; ``rows`` of a block."""

    source: str
    defines: Defines
    rows: int
    threads: int
    shared_bytes: int

    def shape(self, function: str, blocks: int, **numbers: int) -> Shape:
        """The launch of an entry; ``numbers``: arguments that depend on the tokens."""
        kernel = Kernel(self.source, function, self.defines)
        return Shape(kernel, blocks, self.threads, self.shared_bytes, numbers=numbers)


def build_for(
    format: QuantFormat,
    mode: int,
    architecture: str,
    results: Results = Results.ROUNDED,
    tile: Tile = NARROW,
) -> Build:
    """The variant for a weight format, a mode and a tile: wgmma on Hopper, mma.sync elsewhere."""
    source = "linear/prefill_gemm_sm90" if architecture == "sm_90a" else "linear/prefill_gemm"
    return build(source, format, mode, results, tile)


def build(
    source: str,
    format: QuantFormat,
    mode: int,
    results: Results = Results.ROUNDED,
    tile: Tile = NARROW,
    result_bytes: int = 0,
    more: Defines = (),
) -> Build:
    """The variant of ``source`` with ``more`` defines; as many pipeline stages as shared memory
    holds beside ``result_bytes``.
    """
    used = tile.tokens * _TOKEN_BYTES + tile.sides * tile.consumers * sum(STAGE_BYTES[format])
    stage_bytes = round_up(used, 1024)
    other = _OTHER_SHARED + result_bytes
    stages = min(_MAX_STAGES, (_SHARED_LIMIT - other) // stage_bytes)
    shared_bytes = stages * stage_bytes + other
    defines = (
        ("FORMAT", FORMAT_CODE[format]),
        ("MODE", mode),
        ("STAGES", stages),
        ("OUT_FLOAT", int(results is Results.FLOAT)),
        ("LIST", int(results is Results.OF_A_LIST)),
        ("TOKENS", tile.tokens),
        ("CONSUMERS", tile.consumers),
        ("WIDE", int(tile.wide)),
        ("SIDES", tile.sides),
        ("SHARED_BYTES", shared_bytes),
        *more,
    )
    threads = 32 * (tile.consumers + _PRODUCERS)
    return Build(source, defines, tile.rows(mode), threads, shared_bytes)


def linear_batches(
    recording: Recording,
    x_TGK: Tensor,
    weight: PackedWeight,
    out_dtype: torch.dtype,
    fewer_than: int | None = None,
) -> Tensor:
    """``dsv4.ops.linear.prefill_products.Batches`` by one launch.

    Operands are already checked. ``fewer_than``: launched for fewer tokens than this only.
    Raises ``ValueError`` when T is not the recording's number of tokens.
    """
    tokens, groups, columns = x_TGK.shape
    check_recorded(recording, tokens)
    rows = weight.shape[0] // groups
    # bf16 results are written in pairs of rows.
    width = round_up(groups * rows, 2)
    x_TGK = aligned_rows(recording, x_TGK)
    y = recording.empty((tokens, width), out_dtype)
    target = recording.target
    split = Split.of(target, MODE_LINEAR, rows, columns, groups)
    variant = build_for(weight.format, MODE_LINEAR, target.architecture, Results(out_dtype))
    recording.launch(
        by_tokens(short_shape, "prefill_linear", variant, split, fewer_than),
        x=x_TGK,
        **matrix_arguments(weight, "weight"),
        y=y,
        **split.memory(recording),
        rows=rows,
        columns=columns,
        row_tiles=padded(weight.shape[0]) // TILE_ROWS,
        x_stride=x_TGK.stride(0),
        batch_stride=x_TGK.stride(1),
        y_stride=width,
        batches=groups,
    )
    if width == groups * rows:
        return y.unflatten(1, (groups, rows))
    return y[:, None, :rows]


def check_recorded(recording: Recording, tokens: int) -> None:
    """Raises ``ValueError`` when x has another number of tokens than the recording."""
    if tokens != recording.tokens:
        raise ValueError(f"x: found {tokens} tokens, expected {recording.tokens} of the recording")


def matrix_arguments(weight: PackedWeight, prefix: str) -> dict[str, Tensor | None]:
    """Data, block scales and global scales by the names of a kernel's arguments for a matrix."""
    return {f"{prefix}_data": weight.data, **scale_arguments(weight, prefix)}


def scale_arguments(weight: PackedWeight, prefix: str) -> dict[str, Tensor | None]:
    """``matrix_arguments`` without the data."""
    return {
        f"{prefix}_block_scale": weight.block_scale,
        f"{prefix}_global_scale": weight.global_scale,
    }


class Split(NamedTuple):
    """What the number of splits over K follows from, in tiles of 128 tokens.

    ``row_blocks``: of all groups; ``steps``: stages of K.
    """

    row_blocks: int
    steps: int
    multiprocessors: int

    @classmethod
    def of(cls, target: Target, mode: int, rows: int, columns: int, groups: int = 1) -> "Split":
        """That of a product of so many rows of each group."""
        row_blocks = ceil_div(rows, NARROW.rows(mode)) * groups
        return cls(row_blocks, ceil_div(columns, PADDING), target.multiprocessors)

    def tiles(self, tokens: int) -> int:
        """Those of a product of so many tokens."""
        return self.row_blocks * ceil_div(tokens, TILE_TOKENS)

    def splits(self, tokens: int) -> int:
        """So many that no block gets a second tile where one tile for each leaves some idle: the
        blocks of a tile wait for each other.
        """
        per_tile = self.multiprocessors // self.tiles(tokens)
        return max(1, min(per_tile, self.steps // _MIN_SPLIT_STEPS, _MAX_SPLITS))

    @property
    def long_from(self) -> int:
        """From how many tokens on whole tiles by TMA are faster, where there are any."""
        if self.steps // _MIN_SPLIT_STEPS < _FAST_SPLITS:
            return LONG_TOKENS
        token_tiles = self.multiprocessors // (_FAST_SPLITS * self.row_blocks)
        return max(LONG_TOKENS, TILE_TOKENS * token_tiles + 1)

    def memory(self, recording: Recording) -> dict[str, Tensor | None]:
        """Where the parts of split tiles meet in steps of up to the recording's tokens, by the
        names of a kernel's arguments.
        """
        tokens = round_up(recording.tokens, TILE_TOKENS)
        counts = range(TILE_TOKENS, tokens + 1, TILE_TOKENS)
        parts = [self.tiles(n) * self.splits(n) for n in counts if self.splits(n) > 1]
        if not parts:
            return dict(NO_SPLITS)
        floats = TILE_TOKENS * NARROW.rows(MODE_LINEAR)
        return {
            "parts": recording.empty((max(parts) * floats,), torch.float32),
            "counters": recording.zeroed("prefill_splits", _COUNTERS),
        }


def short_shape(
    function: str, variant: Build, split: Split, fewer_than: int | None, tokens: int
) -> Shape | None:
    """The launch of a product of fewer tokens than ``fewer_than``, of any number without it."""
    if fewer_than is not None and tokens >= fewer_than:
        return None
    splits = split.splits(tokens)
    blocks = min(split.tiles(tokens) * splits, split.multiprocessors)
    return variant.shape(function, blocks, tokens=tokens, splits=splits)


_PRODUCTS = PrefillProducts(linear_batches)
linear = _PRODUCTS.linear
grouped_linear = _PRODUCTS.grouped_linear
linear_rows = _PRODUCTS.linear_rows
