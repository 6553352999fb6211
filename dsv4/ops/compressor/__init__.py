"""Compressor: pools windows of ``ratio`` tokens into one cached row each (model.md#compressor).

Ratio 128 (HCA) pools disjoint windows. Ratio 4 (CSA) overlaps: entry m pools the first half of the
channels of window m − 1 with the second half of window m. The op runs the same way for every T and
every position: it always stores the tokens' projections in a ring addressed by absolute position,
always computes ⌈T / ratio⌉ candidate entries, and writes only those whose window is complete.
Nothing depends on a value the host would have to read, and moving the position back undoes a
rejected draft, because the ring still holds the tokens before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, CompressorRing, history_tokens
from dsv4.config import CSA_RATIO
from dsv4.integers import ceil_div
from dsv4.ops.hadamard import hadamard
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope


@dataclass(frozen=True)
class CompressorWeights:
    """ape float32 ``[ratio, w]`` (w = 2d for ratio 4, else d), norm ``[d]``, inv_freq float32 of
    the layer.

    ``rotate_keys``: apply the Hadamard rotation, as the indexer's compressor does.
    ``compute_dtype``: what the pooled value is rounded to before the norm.
    """

    ape: Tensor
    norm: Tensor
    inv_freq: Tensor
    norm_eps: float
    ratio: int
    rotate_keys: bool
    compute_dtype: torch.dtype


def compress(
    kv_TW: Tensor,
    score_TW: Tensor,
    positions_T: Tensor,
    weights: CompressorWeights,
    state: CompressedState,
) -> None:
    """Pools and stores every entry these tokens complete: rows[m] for windows with ratio·(m + 1) ≤
    last position + 1.

    kv and score are the float32 projections ``[T, w]`` of the attention input, score without the
    positional bias; positions int64 ``[T]`` are consecutive. The pooled value is normalised,
    rotated at its window's first position ratio·m, optionally Hadamard-rotated, and quantised by
    its cache.
    """
    ring = state.ring
    score_TW = score_TW + weights.ape[positions_T % weights.ratio]
    local_kv, local_score = _with_history(kv_TW, score_TW, positions_T[0], weights.ratio, ring)
    count = ceil_div(kv_TW.shape[0], weights.ratio)
    windows = positions_T[0] // weights.ratio + _count(count, positions_T)
    pooled = _pool(local_kv, local_score, windows, positions_T[0], weights).to(
        weights.compute_dtype
    )
    rows = rope(
        rms_norm(pooled, weights.norm, weights.norm_eps), windows * weights.ratio, weights.inv_freq
    )
    if weights.rotate_keys:
        rows = hadamard(rows)
    state.rows.write(windows, rows, where=(windows + 1) * weights.ratio <= positions_T[-1] + 1)
    kept = min(kv_TW.shape[0], ring.kv.shape[0])
    slots = positions_T[-kept:] % ring.kv.shape[0]
    ring.kv.index_copy_(0, slots, kv_TW[-kept:])
    ring.score.index_copy_(0, slots, score_TW[-kept:])


def _with_history(
    kv_TW: Tensor, score_TW: Tensor, start: Tensor, ratio: int, ring: CompressorRing
) -> tuple[Tensor, Tensor]:
    """Prepends the ring's last ``history_tokens`` tokens; positions before the sequence start: kv
    0, score −∞.
    """
    history = history_tokens(ratio)
    past = start - history + _count(history, start)
    slots = past % ring.kv.shape[0]
    seen = (past >= 0)[:, None]
    # A slot of an earlier sequence may hold anything, and a weight of 0 times NaN or infinity would
    # be NaN.
    past_kv = torch.where(seen, ring.kv[slots], 0.0)
    past_score = torch.where(seen, ring.score[slots], -torch.inf)
    return torch.cat((past_kv, kv_TW)), torch.cat((past_score, score_TW))


def _pool(
    kv: Tensor, score: Tensor, windows: Tensor, start: Tensor, weights: CompressorWeights
) -> Tensor:
    ratio = weights.ratio
    history = history_tokens(ratio)
    last = (windows + 1) * ratio - 1 - start + history
    tokens = last[:, None] - history + 1 + _count(history, last)
    tokens = tokens.clamp(max=kv.shape[0] - 1)
    kv = kv[tokens]
    score = score[tokens]
    if ratio == CSA_RATIO:
        half = kv.shape[-1] // 2
        kv, score = (
            torch.cat((t[:, :ratio, :half], t[:, ratio:, half:]), dim=1) for t in (kv, score)
        )
    return (torch.softmax(score, dim=1) * kv).sum(dim=1)


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)
