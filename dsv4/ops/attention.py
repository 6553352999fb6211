"""Attention of H query heads over one shared key-value row per slot, with sinks (spec §3.3, §3.4).

A token sees the last ``window`` tokens from the ring plus compressed entries: those the indexer selected (CSA), or all
that are complete (HCA). It is one softmax over all of them and the sink.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache
from dsv4.ops.rope import rope

_TILE_BYTES = 64 << 20


@dataclass(frozen=True)
class KeySet:
    """Where a layer's keys are. ``compressed`` is None for sliding-window-only layers (ratio 0)."""

    ring: RowCache
    compressed: RowCache | None
    ratio: int
    window: int


def sparse_attention(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> Tensor:
    """softmax(q · kᵀ / √D, sink) · k, then the inverse rotary embedding at the query position: ``[T, H, D]``.

    q and the result are in the compute dtype, everything between is float32. ``selected_TK`` int64 lists compressed
    entries (−1: none); None means every entry s < (position + 1) // ratio. The sink is a logit per head that enters
    the denominator only. A token always sees its own key, so no row is empty. The keys of these T tokens must be in
    the caches already.
    """
    rows_per_token = keys.window + _listed(keys, selected_TK)
    tile = max(1, _TILE_BYTES // (4 * q_THD.shape[2] * rows_per_token))
    outputs = []
    for start in range(0, q_THD.shape[0], tile):
        part = slice(start, start + tile)
        selected = None if selected_TK is None else selected_TK[part]
        rows, valid = _gather(keys, selected, positions_T[part])
        outputs.append(_attend(q_THD[part], rows, valid, sink_H))
    out = torch.cat(outputs) if outputs else torch.empty_like(q_THD, dtype=torch.float32)
    return rope(out.to(q_THD.dtype), positions_T, inv_freq, inverse=True)


def _listed(keys: KeySet, selected_TK: Tensor | None) -> int:
    if keys.compressed is None:
        return 0
    return keys.compressed.slots if selected_TK is None else selected_TK.shape[1]


def _gather(keys: KeySet, selected_TK: Tensor | None, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Key rows float32 ``[T, N, D]`` of each token and bool ``[T, N]``: which of them it sees."""
    back = torch.arange(keys.window, device=positions_T.device)
    window = positions_T[:, None] - back
    parts = [(_read(keys.ring, window % keys.ring.slots), window >= 0)]
    if keys.compressed is not None and selected_TK is None:
        entry = torch.arange(keys.compressed.slots, device=positions_T.device)
        rows = keys.compressed.read_all().expand(positions_T.shape[0], -1, -1)
        parts.append((rows, entry < ((positions_T + 1) // keys.ratio)[:, None]))
    elif keys.compressed is not None and selected_TK is not None:
        parts.append((_read(keys.compressed, selected_TK.clamp(min=0)), selected_TK >= 0))
    rows, valid = zip(*parts, strict=True)
    return torch.cat(rows, dim=1), torch.cat(valid, dim=1)


def _read(cache: RowCache, slots: Tensor) -> Tensor:
    """``cache.read(slots)``; decodes every row once instead when the tokens together list more rows than there are."""
    return cache.read_all()[slots] if slots.numel() > cache.slots else cache.read(slots)


def _attend(q_THD: Tensor, rows_TND: Tensor, valid_TN: Tensor, sink_H: Tensor) -> Tensor:
    # A slot that holds no visible key may hold anything, NaN included; 0 · NaN in the second product would spread it.
    rows_TND = torch.where(valid_TN[..., None], rows_TND, 0.0)
    logits = (q_THD.float() @ rows_TND.transpose(1, 2)) * q_THD.shape[-1] ** -0.5
    logits = logits.masked_fill(~valid_TN[:, None], -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - peak)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sink_H.float()[:, None] - peak)
    return (weights @ rows_TND) / denominator
