"""The choice of an engine's decoder: the mode that was asked for, or the faster one that reproduces
the eager step.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv4.decode.cuda_graph_decoder import CUDAGraphDecoder
from dsv4.errors import UserError
from dsv4.step.captured import Mode
from dsv4.step.steps import RecordedSteps

# Steps of a self-check, and where they begin: they complete windows of both ratios (4 and 128).
_CHECK_STEPS = 8
_CHECK_START = 122
# Token ids of a self-check are multiples of this prime, so that they are spread over the
# vocabulary.
_TOKEN_STRIDE = 7919

_LOG = logging.getLogger("dsv4")


@dataclass(frozen=True)
class _Checked:
    """A decoder, whether its logits are the eager ones bit for bit, and how long a step took."""

    decoder: CUDAGraphDecoder
    exact: bool
    ms_per_token: float


def build_decoder(
    mode: Literal["auto", "split", "full"],
    steps: RecordedSteps,
    max_context: int,
    make: Callable[[Mode], CUDAGraphDecoder],
) -> CUDAGraphDecoder:
    """The decoder that ``make`` makes of ``steps`` in this mode.

    "auto" captures both modes, lets each run a few steps against the eager ones and keeps the
    fastest that is exact. Raises ``UserError`` when none is.
    """
    if mode != "auto":
        return make(mode)
    modes: tuple[Mode, ...] = ("split", "full")
    decoders = [make(mode) for mode in modes]
    eager = _check_logits(steps, max_context, lambda token: steps.decode([token]))
    checked = [_check(decoder, eager) for decoder in decoders]
    steps.state.set_position(0)
    for check in checked:
        found = "equal to" if check.exact else "different from"
        ms = check.ms_per_token
        _LOG.info("cuda graph %s: %.2f ms/token, %s eager", check.decoder.mode, ms, found)
    exact = [check for check in checked if check.exact]
    if not exact:
        raise UserError(
            "EngineConfig.cuda_graph: no mode reproduces the eager logits on this machine; "
            "run without it"
        )
    return min(exact, key=lambda check: check.ms_per_token).decoder


def _check(decoder: CUDAGraphDecoder, eager: list[Tensor]) -> _Checked:
    def replay(token: int) -> Tensor:
        return decoder.replay(token, decoder.state.position)

    steps = decoder.steps
    context = decoder.max_context
    replayed = _check_logits(steps, context, replay)
    exact = all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(eager, replayed, strict=True)
    )
    started = time.perf_counter()
    _check_logits(steps, context, replay)[-1].cpu()
    return _Checked(decoder, exact, 1e3 * (time.perf_counter() - started) / len(eager))


@torch.inference_mode()
def _check_logits(
    steps: RecordedSteps, max_context: int, decode: Callable[[int], Tensor]
) -> list[Tensor]:
    """The logits of every step of a self-check."""
    count = min(_CHECK_STEPS, max_context)
    start = min(_CHECK_START, max_context - count)
    vocabulary = steps.model.embed.table_VE.shape[0]
    steps.state.set_position(start)
    return [decode(_TOKEN_STRIDE * step % vocabulary).clone() for step in range(count)]
