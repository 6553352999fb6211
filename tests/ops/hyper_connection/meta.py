"""Arguments of hyper-connections without memory, for recordings that nothing runs."""

from typing import Any

import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.target import Target
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights, decode, prefill
from tests.ops.cases import EPS, HC_EPS
from tests.ops.recorded import HOPPER, launches, meta

F32 = torch.float32
# (M, E)
FLASH = (4, 4096)
PRO = (4, 7168)


def seam_weights(streams: int, width: int) -> HcWeights:
    mixes = (2 + streams) * streams
    fn = meta(mixes, streams * width, dtype=F32)
    base = meta(mixes, dtype=F32)
    return HcWeights(fn, base, meta(3, dtype=F32), EPS, HC_EPS, sinkhorn_iters=20)


def head_weights(streams: int, width: int) -> HcHeadWeights:
    fn = meta(streams, streams * width, dtype=F32)
    base = meta(streams, dtype=F32)
    return HcHeadWeights(fn, base, meta(1, dtype=F32), EPS, HC_EPS)


def incoming(tokens: int, streams: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        meta(tokens, width),
        meta(tokens, streams, width),
        meta(tokens, streams, dtype=F32),
        meta(tokens, streams, streams, dtype=F32),
    )


def arguments(op: str, tokens: int, streams: int, width: int) -> tuple[Any, ...]:
    norm_weight = meta(width, dtype=F32)
    given = incoming(tokens, streams, width)
    return {
        "hc_pre": (given[1], seam_weights(streams, width), norm_weight),
        "hc_seam": (*given, seam_weights(streams, width), norm_weight),
        "hc_head": (given[1], head_weights(streams, width), norm_weight),
        "hc_post": given,
    }[op]


def record(op: str, tokens: int, shape: tuple[int, int], target: Target = HOPPER) -> list[Launch]:
    module = decode if tokens <= 8 else prefill
    given = arguments(op, tokens, *shape)
    return launches(getattr(module, op), *given, tokens=tokens, target=target)
