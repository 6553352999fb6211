"""Compressors of one layer: decode steps inside and at the end of a window, and a chunk."""

from collections.abc import Callable, Iterator

import torch

from dsv4.caches.layer import CompressedState, CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.compressor import CompressorWeights, decode, prefill
from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase

ROPE_WIDTH = 64
# ratio, width, format of the rows
KINDS = {
    "CSA": (4, 512, RowFormat.KV_FP8),
    "index": (4, 128, RowFormat.INDEX_FP8),
    "HCA": (128, 512, RowFormat.KV_FP8),
}


def cases() -> Iterator[OpCase]:
    """Both published models have the same compressors."""
    for kind in KINDS:
        yield _case(kind, "inside a window", 1024, 1)
        yield _case(kind, "completes a window", 1023, 1)
        yield _case(kind, "from a window's start", 1024, 4096)


def _case(kind: str, what: str, start: int, tokens: int) -> OpCase:
    ratio, width, format = KINDS[kind]
    columns = 2 * width if ratio == 4 else width
    entries = (start + tokens) // ratio - start // ratio
    pooled = min(2 * ratio if ratio == 4 else ratio, tokens + ratio) if entries else 0
    nbytes = 8 * columns * (2 * tokens + (pooled if tokens == 1 else 0)) + entries * (width + 136)

    def make(index: int) -> Callable[[], object]:
        device = torch.device("cuda", torch.cuda.current_device())
        rows = RowCache.allocate(
            (start + tokens) // ratio + 1, width, ROPE_WIDTH, format, torch.bfloat16, device
        )
        state = CompressedState(CompressorRing.allocate(ratio, columns, device), rows)
        state.ring.kv.normal_()
        state.ring.score.normal_()
        ape = torch.randn(ratio, columns, device=device)
        norm = torch.ones(width, device=device)
        inv_freq = 160000.0 ** (-torch.arange(0, ROPE_WIDTH, 2, device=device) / ROPE_WIDTH)
        weights = CompressorWeights(
            ape, norm, inv_freq, 1e-6, ratio, kind == "index", torch.bfloat16
        )
        kv_TW, score_TW = (torch.randn(tokens, columns, device=device) for _ in range(2))
        position_T = start + torch.arange(tokens, device=device)
        form = decode if tokens <= MAX_DECODE_TOKENS else prefill
        arguments = (kv_TW, score_TW, position_T, weights, state)
        return TimedOp(form.compress, *arguments).run

    flops = entries * width * 5 * (2 * ratio if ratio == 4 else ratio)
    return OpCase(
        "compress", f"{kind}, {tokens} tokens, {what}", make, nbytes, flops, nbytes + (4 << 20)
    )
