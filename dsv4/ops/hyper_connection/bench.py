"""Hyper-connection seams, block boundaries and the head's collapse, of both models."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights, decode, prefill
from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase

STREAMS = 4
EPS = 1e-6
WIDTHS = {"Flash": 4096, "Pro": 7168}
MIXES = {"hc_pre": 24, "hc_seam": 24, "hc_post": 0, "hc_head": 4}
# Rows of E bf16 values per token that are read or written.
ROWS = {
    "hc_pre": STREAMS + 1,
    "hc_seam": 2 * STREAMS + 2,
    "hc_post": 2 * STREAMS + 1,
    "hc_head": STREAMS + 1,
}


def cases() -> Iterator[OpCase]:
    """One token of every op; the seam also with drafts; prefill chunks."""
    for model in WIDTHS:
        for op in MIXES:
            yield _case(model, op, 1)
        for tokens in (2, 8, 64, 512, 4096):
            yield _case(model, "hc_seam", tokens)
        yield _case(model, "hc_pre", 4096)
        yield _case(model, "hc_post", 4096)


def _case(model: str, op: str, tokens: int) -> OpCase:
    width = WIDTHS[model]
    mixes = MIXES[op]
    module = decode if tokens <= MAX_DECODE_TOKENS else prefill
    weight_bytes = 4 * width * (mixes * STREAMS + (mixes > 0))
    nbytes = weight_bytes + 2 * tokens * width * ROWS[op]
    mixed = STREAMS + 1 if op in ("hc_seam", "hc_post") else 0
    flops = 2 * tokens * width * STREAMS * (mixes + mixed + 1)

    def make(index: int) -> Callable[[], object]:
        streams_TME = torch.randn(tokens, STREAMS, width, device="cuda").bfloat16()
        y_TE = torch.randn(tokens, width, device="cuda").bfloat16()
        post_TM = torch.rand(tokens, STREAMS, device="cuda")
        comb_TMM = torch.rand(tokens, STREAMS, STREAMS, device="cuda") / STREAMS
        if op == "hc_post":
            return TimedOp(module.hc_post, y_TE, streams_TME, post_TM, comb_TMM).run
        fn = torch.randn(mixes, STREAMS * width, device="cuda") * (STREAMS * width) ** -0.5
        base = torch.randn(mixes, device="cuda")
        norm_weight = torch.rand(width, device="cuda")
        if op == "hc_head":
            head = HcHeadWeights(fn, base, torch.ones(1, device="cuda"), EPS, EPS)
            return TimedOp(module.hc_head, streams_TME, head, norm_weight).run
        weights = HcWeights(fn, base, torch.ones(3, device="cuda"), EPS, EPS, sinkhorn_iters=20)
        if op == "hc_pre":
            return TimedOp(_without_comb(module.hc_pre), streams_TME, weights, norm_weight).run
        incoming = y_TE, streams_TME, post_TM, comb_TMM
        return TimedOp(_without_comb(module.hc_seam), *incoming, weights, norm_weight).run

    resident = weight_bytes + 4 * tokens * width * (STREAMS + 1)
    return OpCase(op, f"{model}, {tokens} tokens", make, nbytes, flops, resident)


def _without_comb(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``op`` for who does not ask for comb, its last result: in a step of few tokens it is left
    (``dsv4.ops.hyper_connection.left_comb``), and a launch that nothing needs would be timed too.
    """
    return lambda *given: op(*given)[:-1]
