"""Queries, caches and selections for decode attention on a GPU, and the comparison with torch."""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.integers import ceil_div
from dsv4.ops import TORCH
from dsv4.ops.attention import decode, prefill
from dsv4.ops.immediate import immediately
from tests.ops.forms import by_tokens
from tests.ops.gpu import (
    poison,
    relative_error,
)

HEAD_DIM = 512
ROPE_DIM = 64
WINDOW = 128
RING = 144
ENTRIES = 1400
CSA = 4
HCA = 128
WINDOW_ONLY = 0
RECORDED = by_tokens(decode.sparse_attention, prefill.sparse_attention)
sparse_attention = immediately(RECORDED)


def inv_freq(rope_width: int = ROPE_DIM) -> Tensor:
    return 160000.0 ** (-torch.arange(0, rope_width, 2, device="cuda") / rope_width)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).cuda()


def row_cache(
    slots: int, format: RowFormat, seed: int, width: int = HEAD_DIM, rope_width: int = ROPE_DIM
) -> RowCache:
    """Rows whose groups of 64 differ in size by up to 2^9, between rows and within them."""
    cache = RowCache.allocate(
        slots, width, rope_width, format, torch.bfloat16, torch.device("cuda")
    )
    groups = ceil_div(width, 64)
    exponent = torch.randint(
        -6, 4, (slots, groups, 1), generator=torch.Generator().manual_seed(seed + 1)
    ).cuda()
    spread = torch.exp2(exponent.float()).expand(slots, groups, 64).reshape(slots, -1)[:, :width]
    cache.write(torch.arange(slots, device="cuda"), normal(slots, width, seed=seed) * spread)
    return cache


def random_keys(ratio: int, format: RowFormat, ring: int = RING, entries: int = ENTRIES) -> KeySet:
    return KeySet(
        row_cache(ring, format, 1), row_cache(entries, format, 3) if ratio else None, ratio, WINDOW
    )


def selection(tokens: int, start: int, listed: int, entries: int = ENTRIES) -> Tensor:
    """Distinct complete entries in ascending order, −1 scattered between them where there are
    fewer.
    """
    generator = torch.Generator().manual_seed(start + tokens)
    selected_TK = torch.full((tokens, listed), -1, dtype=torch.int64)
    for t in range(tokens):
        complete = min((start + t + 1) // CSA, entries)
        count = min(listed, complete)
        places = torch.randperm(listed, generator=generator)[:count].sort().values
        selected_TK[t, places] = torch.randperm(complete, generator=generator)[:count].sort().values
    return selected_TK.cuda()


def hide_unseen(keys: KeySet, selected_TK: Tensor | None, positions_T: Tensor) -> KeySet:
    """The same caches with every byte 0xFF, which is NaN in any format, in slots that no token may
    see.
    """
    last = int(positions_T[-1])
    tokens = positions_T.shape[0]
    ring_seen = {
        p % keys.ring.slots for p in range(max(0, last - tokens - keys.window + 2), last + 1)
    }
    hidden = [poisoned(keys.ring, ring_seen)]
    if keys.compressed is not None:
        complete = range(min(keys.compressed.slots, (last + 1) // keys.ratio))
        listed = complete if selected_TK is None else selected_TK.flatten().tolist()
        hidden.append(poisoned(keys.compressed, {entry for entry in listed if entry >= 0}))
    return replace(keys, ring=hidden[0], compressed=hidden[1] if len(hidden) == 2 else None)


def poisoned(cache: RowCache, seen: set[int]) -> RowCache:
    unseen = torch.ones(cache.slots, dtype=torch.bool, device="cuda")
    unseen[list(seen)] = False
    data = cache.data.clone()
    scale = None if cache.block_scale is None else cache.block_scale.clone()
    data.view(torch.uint8)[unseen] = 0xFF
    if scale is not None:
        scale[unseen] = 0xFF
    return replace(cache, data=data, block_scale=scale)


def check(q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, start: int) -> None:
    """Within twice the error that the bf16 torch op has against float32, plus one unit of the
    largest value.
    """
    tokens, heads, width = q_THD.shape
    positions_T = start + torch.arange(tokens, device="cuda")
    sink_H = normal(heads, seed=9)
    frequencies = inv_freq(keys.ring.rope_width)
    hidden = hide_unseen(keys, selected_TK, positions_T)
    poison(16 << 20)
    out = sparse_attention(q_THD, hidden, selected_TK, sink_H, positions_T, frequencies)
    arguments = (keys, selected_TK, sink_H, positions_T, frequencies)
    exact, rounded = (TORCH.sparse_attention(q, *arguments) for q in (q_THD.float(), q_THD))
    assert out.shape == q_THD.shape
    assert out.dtype == torch.bfloat16
    peak = exact.abs().amax(-1, keepdim=True)
    error = (out.float() - exact).abs()
    allowed = 2 * (rounded.float() - exact).abs().amax(-1, keepdim=True)
    allowed = allowed + 2**-8 * peak
    bad = ~(error <= allowed)
    where = bad.nonzero()[:4].tolist()
    assert not bool(bad.any()), (
        f"{int(bad.sum())} of {bad.numel()} wrong, first {where}, error {float(error.max())}"
    )
    assert relative_error(out, exact) < 1.2 * relative_error(rounded, exact) + 5e-4
