"""What a Blackwell product with quantised activations is compiled for: tiles, stages and columns of
tensor memory, or the reasons why there is no such product. Needs no compiler and no GPU.
"""

from typing import NamedTuple

import torch

from dsv4.integers import ceil_div
from dsv4.ops.linear.cutedsl.gemm_config import (
    ARCHITECTURES,
    SMEM_BYTES,
    TENSOR_COLUMNS,
    Rejected,
)
from dsv4.weights.native import INTERLEAVED_ROWS, NATIVE_GROUP
from dsv4.weights.quant import QuantFormat

# Tokens of a CTA: lanes of its tensor memory. A k tile is 128 bytes of a row, four MMAs.
CTA_TOKENS = 128
ROW_BYTES = 128
MMAS = 4
# Four warps for results, one for products, one for copies.
WARPS = 6
# Features are stored by 16 bytes.
_FEATURE_MULTIPLE = 8
# Columns of tensor memory that the scales of 128 rows of a k tile may take.
_SCALE_COLUMNS = 16
# Alignment of the operands, barriers and the address of the tensor memory.
_OTHER_SMEM = 2048
_MOST_STAGES = 12


class ScaledConfig(NamedTuple):
    """What one compiled kernel is made for.

    ``format``: of the native weight; NVFP4 meets NVFP4 activations, the others FP8 ones.
    ``out_dtype``: bfloat16 or float32; None: two weights by turns (``NativeGateUp``), and hidden
    rows are quantised as the activations are. ``sorted``: rows are pairs of an expert from the
    device's list of tiles. A work tile is 128 tokens, or 256 of a ``pair`` of CTAs, times
    ``tile_features``.
    """

    format: QuantFormat
    out_dtype: torch.dtype | None
    sorted: bool
    pair: bool
    tile_features: int
    multiprocessors: int

    @property
    def gated(self) -> bool:
        """Whether it is the product of w1 and w3, with SwiGLU."""
        return self.out_dtype is None

    @property
    def ctas(self) -> int:
        """CTAs of a work tile."""
        return 2 if self.pair else 1

    @property
    def tile_tokens(self) -> int:
        """Tokens of a work tile."""
        return CTA_TOKENS * self.ctas

    @property
    def tile_k(self) -> int:
        """Columns of a k tile."""
        return 2 * ROW_BYTES if self.format is QuantFormat.NVFP4 else ROW_BYTES


class ScaledBudget(NamedTuple):
    """What a configuration takes of a multiprocessor: ``stages`` of shared memory, ``accumulators``
    (work tiles) and scales in ``columns`` of tensor memory.
    """

    stages: int
    accumulators: int
    columns: int


class ScaledProblem(NamedTuple):
    """A product y ``[T, G, R]`` = x ``[T, G, K]`` by G matrices ``[R, K]`` of a native weight, or
    by the experts that pairs are sorted by (``sorted``). ``out_dtype`` as in ``ScaledConfig``;
    then R is that of w1.
    """

    format: QuantFormat
    out_dtype: torch.dtype | None
    tokens: int
    features: int
    columns: int
    groups: int = 1
    sorted: bool = False


def scaled_config(
    problem: ScaledProblem, architecture: str, multiprocessors: int
) -> ScaledConfig | Rejected:
    """The configuration for a problem on a device, or why there is none."""
    reasons = tuple(_reasons(problem, architecture))
    if reasons:
        return Rejected(reasons)
    # Sorted tiles are 128 pairs; an expert seldom has more of a chunk.
    pair = problem.tokens > CTA_TOKENS and not problem.sorted
    tokens = CTA_TOKENS * (2 if pair else 1)
    wide = 256
    tiles = ceil_div(problem.tokens, tokens) * problem.groups * ceil_div(problem.features, wide)
    # Wide tiles, unless that leaves multiprocessors without work.
    fills = tiles * (2 if pair else 1) >= multiprocessors and problem.features % wide == 0
    features = wide if problem.out_dtype is None or fills else CTA_TOKENS
    return ScaledConfig(
        problem.format, problem.out_dtype, problem.sorted, pair, features, multiprocessors
    )


def scaled_budget(config: ScaledConfig) -> ScaledBudget:
    """How a configuration divides shared and tensor memory."""
    features = config.tile_features
    scale_blocks = 1 + ceil_div(features, 128)
    scale_bytes = 128 * scale_blocks * config.tile_k // NATIVE_GROUP[config.format]
    stage_bytes = (CTA_TOKENS + features // config.ctas) * ROW_BYTES + scale_bytes
    stages = min(_MOST_STAGES, (SMEM_BYTES - _OTHER_SMEM) // stage_bytes)
    scale_columns = _SCALE_COLUMNS * scale_blocks
    accumulators = 2 if 2 * features + scale_columns <= TENSOR_COLUMNS else 1
    columns = accumulators * features + scale_columns
    return ScaledBudget(stages, accumulators, columns)


def _reasons(problem: ScaledProblem, architecture: str) -> list[str]:
    reasons = []
    if architecture not in ARCHITECTURES:
        reasons.append(f"{architecture} has no tcgen05")
    if problem.format not in NATIVE_GROUP:
        return [*reasons, f"no tensor core reads {problem.format.value} with block scales"]
    tile_k = 256 if problem.format is QuantFormat.NVFP4 else 128
    if problem.groups > 1 and problem.columns % tile_k:
        reasons.append(f"groups of {problem.columns} columns share k tiles of {tile_k}")
    if problem.groups > 1 and problem.features % CTA_TOKENS:
        reasons.append(f"groups of {problem.features} rows share tiles of {CTA_TOKENS}")
    if problem.groups > 1 and problem.format is QuantFormat.NVFP4:
        reasons.append("groups share the global scale of a row")
    if problem.out_dtype is None and problem.features % INTERLEAVED_ROWS:
        reasons.append(f"{problem.features} hidden columns are no multiple of {INTERLEAVED_ROWS}")
    if problem.features % _FEATURE_MULTIPLE:
        reasons.append(f"{problem.features} features are no multiple of {_FEATURE_MULTIPLE}")
    return reasons
