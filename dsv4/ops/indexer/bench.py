"""Indexer of a CSA layer: query rotation, and selection at short and long contexts."""

from collections.abc import Callable, Iterator

import torch

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.immediate import TimedOp
from dsv4.ops.indexer import decode, prefill
from dsv4.ops.indexer.query import index_query
from dsv4.ops.op_case import OpCase

HEADS = 64
WIDTH = 128
ROPE_WIDTH = 64
LISTED = {"Flash": 512, "Pro": 1024}
# The items of a recorded ``index_select`` of a decode step.
PARTS = {"index_select": (0, None), "index_scores": (0, 1), "top_k_tokens": (1, 2)}


def cases() -> Iterator[OpCase]:
    """Keys in fp8; a context of C tokens holds C / 4 of them."""
    for tokens in (1, 4096):
        yield _query_case(tokens)
    for context in (2048, 8192, 32768, 131072, 1 << 20):
        yield _select_case("Pro", 1, context)
    yield _select_case("Pro", 1, 2048, capacity=1 << 20)
    for context in (8192, 32768, 131072):
        for part in PARTS:
            yield _select_case("Flash", 1, context, part=part)
    yield _select_case("Pro", 8, 32768)
    yield _select_case("Pro", 8, 1 << 20)
    yield _select_case("Pro", 4096, 8192)
    yield _select_case("Pro", 1024, 131072)


def _query_case(tokens: int) -> OpCase:
    nbytes = 2 * 2 * tokens * HEADS * WIDTH

    def make(index: int) -> Callable[[], object]:
        q_TID = torch.randn(tokens, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
        inv_freq = 160000.0 ** (-torch.arange(0, ROPE_WIDTH, 2, device="cuda") / ROPE_WIDTH)
        position_T = 1024 + torch.arange(tokens, device="cuda")
        return TimedOp(index_query, q_TID, position_T, inv_freq).run

    return OpCase("index_query", f"{tokens} tokens", make, nbytes, 0, nbytes)


def _select_case(
    model: str, tokens: int, context: int, capacity: int = 0, part: str = "index_select"
) -> OpCase:
    """``part``: of the op that is measured, its name."""
    start, stop = PARTS[part]
    listed = LISTED[model]
    entries = context // 4
    slots = max(capacity, context) // 4 + 1
    scored = entries if entries > listed else 0
    scores = 2 * tokens * HEADS * WIDTH + scored * (WIDTH + 4)
    selection = 8 * tokens * listed
    between = 4 * tokens * scored
    nbytes = {
        "index_select": scores + selection,
        "index_scores": scores + between,
        "top_k_tokens": between + selection,
    }[part]

    def make(index: int) -> Callable[[], object]:
        device = torch.device("cuda", torch.cuda.current_device())
        plain = torch.bfloat16
        format = RowFormat.INDEX_FP8
        keys = RowCache.allocate(slots, WIDTH, ROPE_WIDTH, format, plain, device)
        for part in torch.arange(slots, device=device).split(65536):
            keys.write(part, torch.randn(len(part), WIDTH, device=device))
        q_TID = torch.randn(tokens, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
        weight_TI = torch.randn(tokens, HEADS, device=device)
        position_T = context - tokens + torch.arange(tokens, device=device)
        module = decode if tokens <= MAX_DECODE_TOKENS else prefill
        arguments = q_TID, weight_TI, 0.01, keys, position_T, listed
        prepared = TimedOp(module.index_select, *arguments)
        prepared.run()
        return lambda: prepared.run(None, start, stop)

    flops = 0 if part == "top_k_tokens" else 2 * tokens * scored * HEADS * WIDTH
    held = f", capacity {capacity}" if capacity else ""
    name = f"{model}, {tokens} tokens, context {context}{held}"
    return OpCase(part, name, make, nbytes, flops, slots * (WIDTH + 4))
