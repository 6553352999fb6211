"""Weights, projections and empty states for tests of the compressor."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops.compressor import CompressorWeights
from tests.ops.cases import EPS, inv_freq, normal

Compress = Callable[[Tensor, Tensor, Tensor, CompressorWeights, CompressedState], None]
WIDTH = 128
ROPE = 64
RATIOS = (4, 128)


def columns(ratio: int) -> int:
    return 2 * WIDTH if ratio == 4 else WIDTH


def weights_for(
    ratio: int, rotate_keys: bool = False, compute_dtype: torch.dtype = torch.float32
) -> CompressorWeights:
    ape = normal(ratio, columns(ratio), seed=100)
    norm = normal(WIDTH, seed=101)
    return CompressorWeights(ape, norm, inv_freq(ratio), EPS, ratio, rotate_keys, compute_dtype)


def unit_norm(weights: CompressorWeights, width: int) -> CompressorWeights:
    """The same pooling without normalisation or rotation: an eps of 1e12 makes the root mean square
    1e6.
    """
    norm = torch.full((width,), 1e6)
    still = torch.zeros_like(weights.inv_freq)
    return CompressorWeights(weights.ape, norm, still, 1e12, weights.ratio, False, torch.float32)


def empty_state(
    ratio: int,
    slots: int,
    format: RowFormat = RowFormat.PLAIN,
    junk: float = torch.nan,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> CompressedState:
    """Every row and the whole ring hold ``junk``, as an earlier sequence might have left them.
    ``dtype``: that of plain rows.
    """
    device = torch.get_default_device()
    rows = RowCache.allocate(slots, width, min(ROPE, width), format, dtype, device)
    ring = CompressorRing.allocate(ratio, 2 * width if ratio == 4 else width, device)
    ring.kv.fill_(junk)
    ring.score.fill_(junk)
    rows.data.fill_(0x7F if rows.data.dtype == torch.uint8 else junk)
    return CompressedState(ring, rows)


def projections(tokens: int, ratio: int, seed: int = 102) -> tuple[Tensor, Tensor]:
    return normal(tokens, columns(ratio), seed=seed), normal(
        tokens, columns(ratio), seed=seed + 1, scale=2.0
    )


def feed(
    compress: Compress,
    state: CompressedState,
    tokens: tuple[Tensor, Tensor],
    start: int,
    stop: int,
    weights: CompressorWeights,
) -> None:
    kv_TW, score_TW = (part[start:stop] for part in tokens)
    compress(kv_TW, score_TW, torch.arange(start, stop), weights, state)
