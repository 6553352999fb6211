"""Decode attention of every kind of layer, and the ops around it: query_rope and kv_write."""

from collections.abc import Callable, Iterator

import torch

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.attention.decode import sparse_attention
from dsv4.ops.immediate import TimedOp
from dsv4.ops.kv_write import decode as kv_write_decode
from dsv4.ops.kv_write import prefill as kv_write_prefill
from dsv4.ops.op_case import OpCase
from dsv4.ops.rope.cuda import DECODE_ROWS_PER_BLOCK, query_rope

WIDTH = 512
ROPE_WIDTH = 64
WINDOW = 128
EPS = 1e-6
HEADS = {"Flash": 64, "Pro": 128}
LISTED = {"Flash": 512, "Pro": 1024}
ROW_BYTES = {RowFormat.KV_FP8: WIDTH + ROPE_WIDTH + 8, RowFormat.PLAIN: 2 * WIDTH}


def cases() -> Iterator[OpCase]:
    """One token at contexts where the lists are full, several tokens, long contexts, bf16 rows;
    then the small ops.
    """
    for model in HEADS:
        yield _attention(model, "CSA", 4, 8192, 1)
        yield _attention(model, "HCA", 128, 8192, 1)
    yield _attention("Flash", "window", 0, 8192, 1)
    yield _attention("Pro", "CSA", 4, 400, 1)
    for tokens in (2, 4, 8):
        yield _attention("Pro", "CSA", 4, 8192, tokens)
    yield _attention("Flash", "CSA", 4, 8192, 2)
    yield _attention("Pro", "HCA", 128, 1 << 17, 1)
    yield _attention("Pro", "HCA", 128, 1 << 20, 1)
    yield _attention("Flash", "HCA", 128, 1 << 20, 1)
    yield _attention("Pro", "CSA", 4, 8192, 1, RowFormat.PLAIN)
    for model, tokens in (("Flash", 1), ("Pro", 1), ("Pro", 4096)):
        yield _query_rope(model, tokens)
    for tokens in (1, 4096):
        yield _kv_write(tokens)


def _attention(
    model: str,
    kind: str,
    ratio: int,
    context: int,
    tokens: int,
    format: RowFormat = RowFormat.KV_FP8,
) -> OpCase:
    heads = HEADS[model]
    complete = (context + tokens) // ratio if ratio else 0
    listed = LISTED[model] if kind == "CSA" else 0
    seen = WINDOW + (min(listed, complete) if listed else complete)
    activations = 2 * tokens * heads * WIDTH * 2
    # Tokens of one step share the window and the complete entries; lists are different rows in the
    # worst case.
    entries = tokens * min(listed, complete) if listed else complete
    rows = (WINDOW + tokens + entries) * ROW_BYTES[format]
    slots = WINDOW + 2 * 8

    def make(index: int) -> Callable[[], object]:
        ring = random_cache(slots, format)
        compressed = random_cache(complete + 1, format) if ratio else None
        positions_T = context + torch.arange(tokens, device="cuda")
        selected_TK = None
        if listed:
            selected_TK = torch.full((tokens, listed), -1, dtype=torch.int64, device="cuda")
            count = min(listed, complete)
            order = torch.rand(tokens, complete, device="cuda").topk(count, dim=1).indices
            selected_TK[:, :count] = order.sort().values
        q_THD = torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        sink_H = torch.randn(heads, device="cuda")
        keys = KeySet(ring, compressed, ratio, WINDOW)
        frequencies = inv_freq()
        arguments = (q_THD, keys, selected_TK, sink_H, positions_T, frequencies)
        return TimedOp(sparse_attention, *arguments).run

    name = f"{model} {kind} T={tokens} at {context}, {seen} keys, {format.value}"
    nbytes = rows + activations + 8 * tokens * listed
    flops = 4 * WIDTH * heads * tokens * seen
    resident = (slots + complete) * ROW_BYTES[format] + activations
    return OpCase("sparse_attention", name, make, nbytes, flops, resident)


def _query_rope(model: str, tokens: int) -> OpCase:
    heads = HEADS[model]

    def make(index: int) -> Callable[[], object]:
        q_THD = torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        positions_T = 8192 + torch.arange(tokens, device="cuda")
        frequencies = inv_freq()
        rows = DECODE_ROWS_PER_BLOCK if tokens <= MAX_DECODE_TOKENS else None
        return TimedOp(query_rope, q_THD, positions_T, frequencies, EPS, rows).run

    nbytes = 2 * tokens * heads * WIDTH * 2
    return OpCase(
        "query_rope", f"{model} T={tokens}", make, nbytes, 4 * tokens * heads * WIDTH, nbytes
    )


def _kv_write(tokens: int) -> OpCase:
    def make(index: int) -> Callable[[], object]:
        ring = random_cache(WINDOW + tokens + 8, RowFormat.KV_FP8)
        kv_TD = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
        norm_weight = torch.ones(WIDTH, device="cuda")
        frequencies = inv_freq()
        positions_T = 8192 + torch.arange(tokens, device="cuda")
        form = kv_write_decode if tokens <= MAX_DECODE_TOKENS else kv_write_prefill
        arguments = (kv_TD, norm_weight, positions_T, frequencies, ring, EPS)
        return TimedOp(form.kv_write, *arguments).run

    nbytes = tokens * (2 * WIDTH + ROW_BYTES[RowFormat.KV_FP8])
    return OpCase("kv_write", f"T={tokens}, fp8", make, nbytes, 8 * tokens * WIDTH, nbytes)


def random_cache(slots: int, format: RowFormat) -> RowCache:
    """Random rows in every slot, on the current device."""
    cache = RowCache.allocate(
        slots, WIDTH, ROPE_WIDTH, format, torch.bfloat16, torch.device("cuda")
    )
    cache.write(torch.arange(slots, device="cuda"), torch.randn(slots, WIDTH, device="cuda"))
    return cache


def inv_freq() -> torch.Tensor:
    """The frequencies of the layers with compressed entries."""
    return 160000.0 ** (-torch.arange(0, ROPE_WIDTH, 2, device="cuda") / ROPE_WIDTH)
