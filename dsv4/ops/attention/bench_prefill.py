"""Prefill attention: one layer of each kind over a chunk of tokens, with fp8 caches and the
dequantization of their rows.
"""

from collections.abc import Callable, Iterator

import torch

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowFormat
from dsv4.ops.attention.bench import ROW_BYTES, WIDTH, WINDOW, inv_freq, random_cache
from dsv4.ops.attention.prefill import sparse_attention, sparse_attention_portable
from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase

# Of the models, and of their ranks.
HEADS = {"Flash": 64, "Pro": 128, "Flash of 2": 32, "Pro of 8": 16}
LISTED = {"Flash": 512, "Pro": 1024, "Flash of 2": 512, "Pro of 8": 1024}


def cases() -> Iterator[OpCase]:
    """Chunks of 512 and 4096 tokens from where every list is full, and a long context."""
    yield _case("Flash", "CSA", 4, 4096, 8192, portable=True)
    yield _case("Pro", "CSA", 4, 4096, 8192, portable=True)
    for model in HEADS:
        for tokens in (512, 4096):
            yield _case(model, "CSA", 4, tokens, 8192)
            yield _case(model, "HCA", 128, tokens, 8192)
    yield _case("Flash", "window", 0, 4096, 8192)
    yield _case("Pro", "HCA", 128, 512, 1 << 19)
    yield _case("Pro", "CSA", 4, 64, 8192)


def _case(
    model: str, kind: str, ratio: int, tokens: int, start: int, portable: bool = False
) -> OpCase:
    heads = HEADS[model]
    listed = LISTED[model] if ratio == 4 else 0
    ring_slots = WINDOW + tokens + 8
    entries = (start + tokens) // ratio + 1 if ratio else 0
    seen = sum(
        WINDOW + (listed or ((start + t + 1) // ratio if ratio else 0)) for t in range(tokens)
    )
    activations = 2 * tokens * heads * WIDTH * 2
    cache = (tokens + WINDOW + entries) * ROW_BYTES[RowFormat.KV_FP8] + 8 * tokens * listed

    def make(index: int) -> Callable[[], object]:
        ring = random_cache(ring_slots, RowFormat.KV_FP8)
        compressed = random_cache(entries, RowFormat.KV_FP8) if ratio else None
        positions_T = start + torch.arange(tokens, device="cuda")
        selected_TK = None
        if listed:
            rows = (
                torch.rand(tokens, (start + 1) // ratio, device="cuda").topk(listed, dim=1).indices
            )
            selected_TK = rows.sort(dim=1).values
        q_THD = torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        sink_H = torch.randn(heads, device="cuda")
        keys = KeySet(ring, compressed, ratio, WINDOW)
        op = sparse_attention_portable if portable else sparse_attention
        arguments = (q_THD, keys, selected_TK, sink_H, positions_T, inv_freq())
        return TimedOp(op, *arguments).run

    name = f"{model} {kind}, {tokens} tokens at {start}{', mma.sync' if portable else ''}"
    return OpCase(
        "attention_prefill",
        name,
        make,
        activations + cache,
        4 * WIDTH * heads * seen,
        activations + cache,
    )
