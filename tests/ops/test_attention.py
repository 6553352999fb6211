"""Sparse attention: window, compressed entries, sink, inverse rotation."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.ops import Ops
from dsv4.ops.attention import KeySet
from tests.ops.cases import HEAD_DIM, ROPE_DIM, WINDOW, assert_near, exact_rope, inv_freq, normal


def cache(slots: int, seed: int, format: RowFormat = RowFormat.PLAIN) -> RowCache:
    rows = RowCache.allocate(slots, HEAD_DIM, ROPE_DIM, format, torch.float32, torch.get_default_device())
    rows.write(torch.arange(slots), normal(slots, HEAD_DIM, seed=seed))
    return rows


def exact_attention(
    q_HD: Tensor, keys: KeySet, selected: list[int] | None, sink_H: Tensor, position: int, frequencies: Tensor
) -> Tensor:
    """One query, float64, key by key."""
    seen = [keys.ring.data[p % keys.ring.slots] for p in range(max(0, position - keys.window + 1), position + 1)]
    if keys.compressed is not None:
        entries = range((position + 1) // keys.ratio) if selected is None else [s for s in selected if s >= 0]
        seen += [keys.compressed.data[s] for s in entries]
    rows_ND = torch.stack(seen).double()
    heads = []
    for q, sink in zip(q_HD.double(), sink_H.tolist(), strict=True):
        logits = [float(q @ row) / math.sqrt(q_HD.shape[1]) for row in rows_ND]
        peak = max([*logits, sink])
        shares = [math.exp(logit - peak) for logit in logits]
        total = sum(shares) + math.exp(sink - peak)
        heads.append(sum((s / total * row for s, row in zip(shares, rows_ND, strict=True)), torch.zeros(1)))
    return exact_rope(torch.stack(heads), position, frequencies, inverse=True)


@pytest.mark.parametrize("ratio", [0, 128])
@pytest.mark.parametrize("start", [0, 126, 127, 128, 300])
def test_dense_layers_equal_the_formula(ops: Ops, ratio: int, start: int) -> None:
    keys = KeySet(cache(160, seed=1), cache(4, seed=2) if ratio else None, ratio, WINDOW)
    q_THD, sink_H = normal(3, 2, HEAD_DIM, seed=3), normal(2, seed=4)
    out = ops.sparse_attention(q_THD, keys, None, sink_H, start + torch.arange(3), inv_freq(ratio))
    for t in range(3):
        assert_near(out[t], exact_attention(q_THD[t], keys, None, sink_H, start + t, inv_freq(ratio)), 3e-6)
