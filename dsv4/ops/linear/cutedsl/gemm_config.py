"""What a Blackwell product with 16-bit activations is compiled for: tiles, stages and columns of
tensor memory, or the reasons why there is no such product. Needs no compiler and no GPU.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dsv4.integers import ceil_div, round_up
from dsv4.weights.quant import QuantFormat

# The most that a block may have.
SMEM_BYTES = 227 << 10
TENSOR_COLUMNS = 512
REGISTERS = 64 << 10
# Features of one accumulator: lanes of tensor memory, and rows of a row tile.
SIDE_ROWS = 128
TILE_ROWS = 16
# Columns of a k tile; it takes half as many columns of tensor memory, 32 bits each.
TILE_K = 64
# Pairs of ``dsv4.ops.moe.sorted_pairs.Sorted.tiles``.
SORTED_TILE = 128
ARCHITECTURES = ("sm_100a", "sm_103a")
# Fewer tokens leave most multiprocessors without a work tile of a dense product; the portable
# kernel divides K among them.
DENSE_TOKENS = 128

# 32-bit words of one row tile and 64 columns in units of 128 words, and words of its block scales.
CHUNKS = {
    QuantFormat.NVFP4: 1,
    QuantFormat.MXFP4: 1,
    QuantFormat.FP8_BLOCK128: 2,
    QuantFormat.BF16: 4,
}
SCALE_WORDS = {QuantFormat.NVFP4: 16, QuantFormat.MXFP4: 8}
# Alignment of the operands, barriers and the address of the tensor memory.
_OTHER_SMEM = 2048
_MOST_STAGES = 12
_MOST_FRAGMENTS = 8
# Four warps for results, one for products, one for copies, two groups of four that decode, and two
# that gather tokens.
_WARPS = 14
_GATHER_WARPS = 2


class W16Config(NamedTuple):
    """What one compiled kernel is made for.

    A work tile is ``tile_tokens`` tokens times ``sides`` · 128 features. ``gated``: two weights,
    SwiGLU of their products. ``sorted``: tokens are pairs of an expert from the device's list of
    tiles.
    """

    format: QuantFormat
    out_dtype: torch.dtype
    gated: bool
    sorted: bool
    tile_tokens: int
    sides: int
    multiprocessors: int

    @property
    def gathers(self) -> bool:
        """Whether tokens are gathered by their numbers; hidden rows are sorted already."""
        return self.gated and self.sorted

    @property
    def threads(self) -> int:
        return 32 * (_WARPS + (_GATHER_WARPS if self.gathers else 0))


class W16Budget(NamedTuple):
    """What a configuration takes of a multiprocessor.

    ``stages`` of shared memory, ``fragments``: k tiles of decoded weights in tensor memory,
    ``accumulators``: work tiles there.
    """

    stages: int
    fragments: int
    accumulators: int


class Rejected(NamedTuple):
    """No kernel takes the product; ``reasons``: one clause for each thing in the way."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.reasons)


class W16Problem(NamedTuple):
    """A product y ``[T, G, R]`` = x ``[T, G, K]`` by G matrices ``[R, K]``, or by the experts.

    ``exact_scales``: FP8 block scales are powers of two. ``experts``: 0 for a dense product, else
    the number of matrices that ``tokens`` pairs are sorted by.
    """

    format: QuantFormat
    out_dtype: torch.dtype
    tokens: int
    features: int
    columns: int
    groups: int = 1
    experts: int = 0
    gated: bool = False
    exact_scales: bool = True


def w16_config(
    problem: W16Problem, architecture: str, multiprocessors: int
) -> W16Config | Rejected:
    """The configuration for a problem on a device, or why there is none."""
    reasons = tuple(_reasons(problem, architecture))
    if reasons:
        return Rejected(reasons)
    tile_tokens, sides = _tile(problem, multiprocessors)
    return W16Config(
        problem.format,
        problem.out_dtype,
        problem.gated,
        problem.experts > 0,
        tile_tokens,
        sides,
        multiprocessors,
    )


def budget(config: W16Config) -> W16Budget:
    """How a configuration divides shared and tensor memory."""
    words = 128 * CHUNKS[config.format] + SCALE_WORDS.get(config.format, 0)
    weight_bytes = config.sides * SIDE_ROWS // TILE_ROWS * 4 * words
    stage_bytes = round_up(2 * config.tile_tokens * TILE_K + weight_bytes, 1024)
    stages = min(_MOST_STAGES, (SMEM_BYTES - _OTHER_SMEM) // stage_bytes)
    columns = config.sides * config.tile_tokens
    fragment = config.sides * TILE_K // 2
    accumulators = 2 if 2 * columns + 4 * fragment <= TENSOR_COLUMNS else 1
    fragments = min(_MOST_FRAGMENTS, (TENSOR_COLUMNS - accumulators * columns) // fragment)
    # Two groups decode k tiles in turn, up to a tile more than there are fragments behind one that
    # has not come. A stage of both would then be taken for full by the parity of a round before.
    if stages < fragments + 2:
        stages -= stages % 2
    return W16Budget(stages, fragments, accumulators)


@functools.cache
def w16_configs(
    problem: W16Problem, architecture: str, multiprocessors: int, rows_per_token: int = 1
) -> frozenset[W16Config]:
    """All configurations that the problem takes for its tokens or fewer, in steps of
    ``rows_per_token``; none where it is rejected for all of them.
    """
    counts = range(rows_per_token, problem.tokens + 1, rows_per_token)
    found = (
        w16_config(problem._replace(tokens=tokens), architecture, multiprocessors)
        for tokens in counts
    )
    return frozenset(config for config in found if isinstance(config, W16Config))


def _tile(problem: W16Problem, multiprocessors: int) -> tuple[int, int]:
    """(tile_tokens, sides) of a work tile: the largest that leaves no multiprocessor without one,
    but for half a token tile that an average expert would leave empty.
    """
    if problem.gated or problem.experts:
        average = problem.tokens // max(problem.experts, 1)
        return (128 if average > 64 else 64), 2
    tiles = ceil_div(problem.tokens, 128) * problem.groups
    pairs = ceil_div(problem.features, 2 * SIDE_ROWS) * tiles
    if problem.features > SIDE_ROWS and pairs >= multiprocessors:
        return 128, 2
    alone = ceil_div(problem.features, SIDE_ROWS) * tiles
    return (64 if 2 * alone <= multiprocessors else 128), 1


def _reasons(problem: W16Problem, architecture: str) -> Iterator[str]:
    if architecture not in ARCHITECTURES:
        yield f"{architecture} has no tcgen05"
    if problem.format not in CHUNKS:
        yield f"no kernel decodes {problem.format.value}"
    if problem.format is QuantFormat.FP8_BLOCK128 and not problem.exact_scales:
        yield "FP8 block scales that are not all powers of two"
    if problem.groups > 1 and problem.features % TILE_ROWS:
        yield f"groups of {problem.features} rows, which share row tiles of {TILE_ROWS}"
    if not (problem.gated or problem.experts) and problem.tokens < DENSE_TOKENS:
        yield f"{problem.tokens} tokens of a dense product, fewer than {DENSE_TOKENS}"
