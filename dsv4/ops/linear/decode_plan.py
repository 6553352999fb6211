"""How ``decode_linear.cu`` splits a product over blocks, warps and shared memory: a pure function
of the shape.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.integers import ceil_div, round_up
from dsv4.launch.constants import SLOT_LINE_BYTES, STAGE_SCALE_BYTES
from dsv4.launch.kernel import Defines
from dsv4.launch.target import Target
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.weights.packed import chunk_columns
from dsv4.weights.quant import QuantFormat

# Both as in decode_products.cuh.
MAX_MATRICES = 8
MAX_SLICES = 8
# 12, 20 and 24 warps are slower (docs/kernels/linear.md). The number of warps decides how K is cut,
# so it is the same for all numbers of tokens.
WARPS = 16
# Stages of a warp's ring, from the best on.
_DEPTHS = (4, 3, 2)
# The static arrays of the kernel come out of the 227 KiB that a block may have.
SHARED_LIMIT = (227 << 10) - (4 << 10)
# Asked for by every block: two on one SM double up where a launch that begins early finds others
# free, and were slower (docs/kernels/linear.md); a block of another kernel still fits beside one.
LEAST_SHARED = 116 << 10
_TILE_ROWS = 16
_STAGE_LOADS = 4
_STAGE_DATA = 2048
_SLICE_MULTIPLE = 256
# Eights of activations that a thread may hold, of all tokens together.
_MOST_PIECES = 8
_THREAD_COLUMNS = 8
# Cycles of one SM of an H200 for a stage, where instructions bound it.
_STAGE_CYCLES = {
    QuantFormat.NVFP4: 124,
    QuantFormat.MXFP4: 115,
    QuantFormat.FP8_BLOCK128: 95,
    QuantFormat.BF16: 90,
}


class ProductShape(NamedTuple):
    """``tiles[i]`` row tiles (per group) of ``formats[i]``, K = ``columns``.

    ``later``: tiles of the only format that blocks multiply behind their others, and not in every
    step.
    """

    formats: tuple[QuantFormat, ...]
    tiles: tuple[int, ...]
    columns: int
    groups: int = 1
    later: int = 0


@dataclass(frozen=True)
class LinearPlan:
    """Launch parameters of ``decode_linear``. ``clusters[i]`` is for the matrices of format i, per
    group.

    ``depth``: stages of 2 KiB in each warp's ring. ``turns``: slices of K that a block takes one
    after the other.
    """

    tokens: int
    cluster: int
    clusters: tuple[int, ...]
    slice_columns: int
    activation_bytes: int
    partial_bytes: int
    shared_bytes: int
    ragged: bool
    depth: int
    turns: int = 1
    has_later: bool = False

    def blocks(self, groups: int) -> int:
        """Blocks of the launch."""
        return self.cluster * (groups * self.clusters[0] + sum(self.clusters[1:]))

    @property
    def defines(self) -> Defines:
        """Those of ``decode_linear.cu`` that the plan decides."""
        return (
            ("TOKENS", self.tokens),
            ("RAGGED_K", int(self.ragged)),
            ("WARPS", WARPS),
            ("DEPTH", self.depth),
            ("PIECES", self._pieces if self._holds_slice else 1),
            ("HOLDS_SLICE", int(self._holds_slice)),
            ("TURNS", self.turns),
            ("CLUSTER", self.cluster),
            ("LATER", int(self.has_later)),
        )

    @property
    def _pieces(self) -> int:
        """Eights of columns per thread and token, in all of a slice."""
        return ceil_div(self.slice_columns, _THREAD_COLUMNS * 32 * WARPS)

    @property
    def _holds_slice(self) -> bool:
        """Whether a thread's registers have room for them."""
        return 0 < self._pieces * self.tokens <= _MOST_PIECES


@functools.cache
def plan_linear(shape: ProductShape, tokens: int, target: Target) -> LinearPlan:
    """The plan of one product of up to 8 tokens.

    A block gets whole tiles of one format and all of K; the number of blocks is what makes the
    busiest one least busy. Where the activations of all of K do not fit into a block, clusters of 2
    or 4 blocks take a slice of K each, which was slower wherever both fit (docs/kernels/linear.md).
    Where that is not enough, blocks take their K in several slices. Rings have fewer stages where
    that saves sharing K. Raises ``ValueError`` when even the smallest slices do not fit.

    K is shared as the next power of two of tokens needs it: so a token's sums have the same order,
    and the same bits, among 5, 6, 7 and 8 tokens.
    """
    return _deepest(shape, tokens, target, _share_columns(_tightest(shape, tokens, target)))


@functools.cache
def plan_share(shape: ProductShape, tokens: int, target: Target) -> LinearPlan:
    """The plan of the tiles that a rank has of a list.

    They are so few that blocks share K, in clusters of 1, 2 or 4: those by which the busiest block
    has least to do, and of equals the largest, which were faster. So a token's sums have the same
    order in steps of every length. Raises ``ValueError`` as ``plan_linear``.
    """
    problem = _tightest(shape, MAX_DECODE_TOKENS, target)
    loads = {}
    for cluster in (4, 2, 1):
        sharing = _Sharing(cluster, cluster)
        plan = _plan(problem, sharing)
        if plan is not None:
            loads[sharing] = _tiles_per_cluster(shape, plan.clusters) / cluster
    sharing = min(loads, key=loads.__getitem__) if loads else _share_columns(problem)
    return _deepest(shape, tokens, target, sharing)


def _deepest(shape: ProductShape, tokens: int, target: Target, sharing: "_Sharing") -> LinearPlan:
    """The plan with K shared so whose rings have most stages."""
    plans = (_plan(_Problem(shape, tokens, target, depth), sharing) for depth in _DEPTHS)
    return next(plan for plan in plans if plan is not None)


@functools.cache
def has_room_for_columns(shape: ProductShape, tokens: int, target: Target) -> bool:
    """Whether blocks get all of K."""
    return _plan(_tightest(shape, tokens, target), _WHOLE) is not None


class _Problem(NamedTuple):
    shape: ProductShape
    tokens: int
    target: Target
    depth: int


def _tightest(shape: ProductShape, tokens: int, target: Target) -> _Problem:
    """What decides how K is shared: the next power of two of tokens, and the shortest ring."""
    padded_tokens = next(size for size in (1, 2, 4, 8) if size >= tokens)
    return _Problem(shape, padded_tokens, target, min(_DEPTHS))


class _Sharing(NamedTuple):
    """K in ``slices`` slices on clusters of ``cluster`` blocks, of which ``waves`` run in turn."""

    cluster: int
    slices: int
    waves: int = 1


_WHOLE = _Sharing(1, 1)


def _share_columns(problem: _Problem) -> _Sharing:
    """The first that fits."""
    clusters = [_Sharing(cluster, cluster) for cluster in (1, 2, 4)]
    turns = itertools.product(range(1, 65), range(2, MAX_SLICES + 1))
    for sharing in (*clusters, *(_Sharing(1, slices, waves) for waves, slices in turns)):
        if _plan(problem, sharing) is not None:
            return sharing
    raise ValueError(
        f"weight: found {problem.shape.tiles} row tiles of K = {problem.shape.columns}, "
        "more than the decode kernel can hold"
    )


def _stage_columns(format: QuantFormat) -> int:
    return _STAGE_LOADS * chunk_columns(format)


def slot_bytes(formats: tuple[QuantFormat, ...]) -> int:
    """Of a decode kernel's ring, for a stage of any of the formats: as in ``weight_tile.cuh``."""
    most = max(STAGE_SCALE_BYTES[format] for format in formats)
    return round_up(_STAGE_DATA + most, SLOT_LINE_BYTES)


def _stages(shape: ProductShape) -> list[int]:
    padded_columns = round_up(shape.columns, 64)
    return [ceil_div(padded_columns, _stage_columns(format)) for format in shape.formats]


def _tiles_per_cluster(shape: ProductShape, clusters: tuple[int, ...]) -> int:
    return max(ceil_div(count, used) for count, used in zip(shape.tiles, clusters, strict=True))


def _plan(problem: _Problem, sharing: _Sharing) -> LinearPlan | None:
    """The plan with K shared so; None when it does not work out."""
    shape, tokens, *_ = problem
    cluster, slices, waves = sharing
    padded_columns = round_up(shape.columns, 64)
    whole = round_up(padded_columns, _SLICE_MULTIPLE)
    slice_columns = round_up(ceil_div(whole, slices), _SLICE_MULTIPLE)
    budget = problem.target.resident_clusters(cluster) * waves // shape.groups
    too_few = cluster > 1 and budget < len(shape.tiles)
    if ceil_div(padded_columns, slice_columns) != slices or too_few:
        return None
    pairs = zip(_stages(shape), shape.formats, strict=True)
    costs = [stages * _STAGE_CYCLES[format] for stages, format in pairs]
    clusters = _balance(shape.tiles, costs, max(len(shape.tiles), budget))
    most_tiles = _tiles_per_cluster(shape, clusters)
    ring = WARPS * problem.depth * slot_bytes(shape.formats)
    activations = 2 * tokens * slice_columns
    tile_bytes = _TILE_ROWS * tokens * 4
    partials = ceil_div(slices, cluster) * (most_tiles + WARPS - 1) * tile_bytes
    if shape.later:
        partials += (ceil_div(shape.later, clusters[0]) + WARPS - 1) * tile_bytes
    received = round_up(most_tiles, cluster) * tile_bytes if cluster > 1 else 0
    shared = ring + activations + partials + received
    if shared > SHARED_LIMIT:
        return None
    return LinearPlan(
        tokens,
        cluster,
        clusters,
        slice_columns,
        activations,
        partials,
        shared_bytes=max(shared, LEAST_SHARED),
        ragged=any(padded_columns % _stage_columns(format) for format in shape.formats),
        depth=problem.depth,
        turns=slices // cluster,
        has_later=shape.later > 0,
    )


def _balance(tiles: tuple[int, ...], costs: list[int], budget: int) -> tuple[int, ...]:
    """Clusters per format, at most ``budget`` together, that minimise the cost of the busiest."""
    if sum(tiles) <= budget:
        return tiles
    limits = sorted(
        {
            count * cost
            for most, cost in zip(tiles, costs, strict=True)
            for count in range(1, most + 1)
        }
    )
    for limit in limits:
        if limit < max(costs):
            continue
        # The small term undoes the rounding of limit = count · cost.
        blocks = [
            ceil_div(count, int(limit / cost + 1e-9))
            for count, cost in zip(tiles, costs, strict=True)
        ]
        if sum(blocks) <= budget:
            break
    while sum(blocks) < budget:
        loads = [
            count * cost / used for count, cost, used in zip(tiles, costs, blocks, strict=True)
        ]
        growable = [index for index, count in enumerate(tiles) if blocks[index] < count]
        blocks[max(growable, key=loads.__getitem__)] += 1
    return tuple(blocks)
