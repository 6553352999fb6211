"""Everything between a layer's projections and its attention, by kind of layer: one launch for a
decode step.
"""

from collections.abc import Callable, Iterator

import torch

from dsv4.caches.layer import CompressedState, CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.prepare_attention.decode import prepare_attention

WIDTH = 512
INDEX_WIDTH = 128
ROPE_WIDTH = 64
INDEX_HEADS = 64
EPS = 1e-6
HEADS = {"Flash": 64, "Pro": 128}
RATIOS = {"window": 0, "CSA": 4, "HCA": 128}
INSIDE = 8192
LAST = 8191


def cases() -> Iterator[OpCase]:
    """One token inside a window and one that completes it, eight tokens."""
    for model in HEADS:
        for kind in RATIOS:
            yield _case(model, kind, "inside a window", INSIDE, 1)
            if kind != "window":
                yield _case(model, kind, "completes a window", LAST, 1)
        yield _case(model, "CSA", "completes two windows", INSIDE, 8)


def _case(model: str, kind: str, what: str, start: int, tokens: int) -> OpCase:
    heads = HEADS[model]
    ratio = RATIOS[kind]
    index_heads = INDEX_HEADS if kind == "CSA" else 0
    widths = {"window": [], "HCA": [WIDTH], "CSA": [WIDTH, INDEX_WIDTH]}[kind]
    nbytes = tokens * (
        4 * heads * WIDTH + 4 * index_heads * INDEX_WIDTH + 2 * WIDTH + WIDTH + ROPE_WIDTH + 8
    )
    resident = nbytes
    for width in widths:
        columns = 2 * width if ratio == 4 else width
        complete = (start + tokens) // ratio - start // ratio
        history = complete * (2 * ratio if ratio == 4 else ratio)
        nbytes += 8 * columns * (2 * tokens + max(0, history - tokens)) + complete * (width + 136)
        resident += 32 * columns * ratio + (start // ratio) * (width + 136)

    def make(index: int) -> Callable[[], object]:
        device = torch.device("cuda", torch.cuda.current_device())
        frequencies = 160000.0 ** (-torch.arange(0, ROPE_WIDTH, 2, device=device) / ROPE_WIDTH)
        norm = QueryKeyNorm(torch.ones(WIDTH, device=device), frequencies, EPS)
        ring = RowCache.allocate(144, WIDTH, ROPE_WIDTH, RowFormat.KV_FP8, torch.bfloat16, device)
        q_THD, kv_TD = (_random(tokens, *shape) for shape in ((heads, WIDTH), (WIDTH,)))
        queries = Queries(q_THD, _random(tokens, index_heads, INDEX_WIDTH) if index_heads else None)
        compressions = tuple(_compression(ratio, width, start, tokens, norm) for width in widths)
        positions_T = start + torch.arange(tokens, device=device)
        arguments = (queries, kv_TD, positions_T, norm, ring, compressions)
        return TimedOp(prepare_attention, *arguments).run

    name = f"{model} {kind}, {tokens} tokens, {what}"
    return OpCase("prepare_attention", name, make, nbytes, 8 * tokens * heads * WIDTH, resident)


def _compression(
    ratio: int, width: int, start: int, tokens: int, norm: QueryKeyNorm
) -> Compression:
    device = norm.kv_norm.device
    columns = 2 * width if ratio == 4 else width
    format = RowFormat.KV_FP8 if width == WIDTH else RowFormat.INDEX_FP8
    rows = RowCache.allocate(
        (start + tokens) // ratio + 1, width, ROPE_WIDTH, format, torch.bfloat16, device
    )
    state = CompressedState(CompressorRing.allocate(ratio, columns, device), rows)
    state.ring.kv.normal_()
    state.ring.score.normal_()
    ape = torch.randn(ratio, columns, device=device)
    weight = torch.ones(width, device=device)
    weights = CompressorWeights(
        ape, weight, norm.inv_freq, norm.eps, ratio, width == INDEX_WIDTH, torch.bfloat16
    )
    kv_TW, score_TW = (torch.randn(tokens, columns, device=device) for _ in range(2))
    return Compression(kv_TW, score_TW, weights, state)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
