"""Attention of H query heads over one key-value row per slot, with sinks (model.md#attention).

A token sees the last ``window`` tokens from the ring plus compressed entries: those the indexer
selected (CSA), or all that are complete (HCA). It is one softmax over all of them and the sink.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.ops.rope import rope

# Tokens at a time, and bytes of their logits: what the torch op holds at once.
TILE_TOKENS = 64
TILE_BYTES = 64 << 20


def sparse_attention(
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    """softmax(q · kᵀ / √D, sink) · k, then the inverse rotary embedding at the query position:
    ``[T, H, D]``.

    q and the result are in the compute dtype, everything between is float32. ``selected_TK`` int64
    lists compressed entries (−1: none); None means every entry s < (position + 1) // ratio. The
    sink is a logit per head that enters the denominator only. A token always sees its own key, so
    no row is empty. The keys of these T tokens must be in the caches already.
    """
    listed = 0
    dense_CD = None
    if keys.compressed is not None:
        listed = keys.compressed.slots if selected_TK is None else selected_TK.shape[1]
        # It is cheaper to dequantize every row once when the tokens together list more rows than
        # there are.
        if listed * q_THD.shape[0] >= keys.compressed.slots:
            dense_CD = keys.compressed.read_all()
    logit_bytes = 4 * q_THD.shape[1] * (keys.window + TILE_TOKENS + listed)
    tile = max(1, min(TILE_TOKENS, TILE_BYTES // logit_bytes))
    outputs = []
    for start in range(0, q_THD.shape[0], tile):
        part = slice(start, start + tile)
        sources = [_window_rows(keys, positions_T[part])]
        if keys.compressed is not None:
            selected = None if selected_TK is None else selected_TK[part]
            sources.append(_compressed_rows(keys, dense_CD, selected, positions_T[part]))
        outputs.append(_attend(q_THD[part], sources, sink_H))
    out_THD = torch.cat(outputs).to(q_THD.dtype)
    return rope(out_THD, positions_T, inv_freq, inverse=True)


@dataclass(frozen=True)
class _Source:
    """Key rows float32, shared by the tokens ``[N, D]`` or per token ``[T, N, D]``; bool which of
    them each token sees.
    """

    rows: Tensor
    valid_TN: Tensor


def _window_rows(keys: KeySet, positions_T: Tensor) -> _Source:
    """The consecutive tokens that any of these consecutive tokens has in its window."""
    count = keys.window - 1 + positions_T.shape[0]
    position = positions_T[-1] - count + 1 + torch.arange(count, device=positions_T.device)
    back = positions_T[:, None] - position
    valid_TN = (position >= 0) & (back >= 0) & (back < keys.window)
    return _Source(_without_unseen(keys.ring.read(position % keys.ring.slots), valid_TN), valid_TN)


def _compressed_rows(
    keys: KeySet, dense_CD: Tensor | None, selected_TK: Tensor | None, positions_T: Tensor
) -> _Source:
    """The complete entries, or those selected; ``dense_CD`` are all rows of the cache where they
    are dequantized already.
    """
    assert keys.compressed is not None
    if selected_TK is None:
        assert dense_CD is not None
        entry = torch.arange(dense_CD.shape[0], device=positions_T.device)
        valid_TN = entry < ((positions_T + 1) // keys.ratio)[:, None]
        return _Source(_without_unseen(dense_CD, valid_TN), valid_TN)
    slots = selected_TK.clamp(min=0)
    rows = keys.compressed.read(slots) if dense_CD is None else dense_CD[slots]
    seen_TK = selected_TK >= 0
    return _Source(rows.masked_fill(~seen_TK[..., None], 0.0), seen_TK)


def _without_unseen(rows_ND: Tensor, valid_TN: Tensor) -> Tensor:
    """Zeroes rows no token sees: such a slot may hold anything, and 0 · NaN would spread through
    the value product.
    """
    return rows_ND.masked_fill(~valid_TN.any(0)[:, None], 0.0)


def _attend(q_THD: Tensor, sources: list[_Source], sink_H: Tensor) -> Tensor:
    valid_TN = torch.cat([source.valid_TN for source in sources], dim=1)
    logits = torch.cat(
        [q_THD.float() @ source.rows.transpose(-1, -2) for source in sources], dim=-1
    )
    logits = (logits * q_THD.shape[-1] ** -0.5).masked_fill(~valid_TN[:, None], -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - peak)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sink_H.float()[:, None] - peak)
    parts = weights.split([source.valid_TN.shape[1] for source in sources], dim=-1)
    weighted = [part @ source.rows for part, source in zip(parts, sources, strict=True)]
    return torch.stack(weighted).sum(0) / denominator
