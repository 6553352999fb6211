"""Which decoder an engine gets: none, the mode that was asked for, or the faster one that reproduces the eager step."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import EngineConfig
from dsv4.decode.captured_step import Mode
from dsv4.decode.cuda_graph_decoder import CUDAGraphDecoder
from dsv4.errors import UserError
from dsv4.model import Transformer
from dsv4.ops import Ops, TableName
from dsv4.state import DecodeState

# Steps of a self-check, and where they begin: they complete windows of both ratios (4 and 128).
_CHECK_STEPS, _CHECK_START = 8, 122

_LOG = logging.getLogger("dsv4")


@dataclass(frozen=True)
class _Checked:
    """A captured decoder, whether its logits are the eager ones bit for bit, and how long a step took."""

    decoder: CUDAGraphDecoder
    exact: bool
    ms_per_token: float


def check_cuda_graph(engine: EngineConfig, devices: Sequence[torch.device], table: TableName) -> None:
    """Raises ``UserError`` when graphs are asked for where nothing can be captured."""
    if engine.cuda_graph is None:
        return
    if devices[0].type != "cuda":
        raise UserError(f"--cuda-graph {engine.cuda_graph}: found no CUDA device to run on, expected one")
    if table == "torch":
        raise UserError(f"--cuda-graph {engine.cuda_graph}: found the torch ops, expected --ops cuda")


def build_decoder(
    engine: EngineConfig, model: Transformer, state: DecodeState, ops: Ops, max_context: int
) -> CUDAGraphDecoder | None:
    """A decoder captured for one token a step; None without ``engine.cuda_graph``.

    "auto" captures both modes, lets each run a few steps against the eager ones and keeps the fastest that is exact.
    Raises ``UserError`` when none is.
    """
    if engine.cuda_graph is None:
        return None
    if engine.cuda_graph != "auto":
        decoder = CUDAGraphDecoder(model, state, ops, engine.cuda_graph, max_context)
        decoder.capture()
        return decoder
    modes: tuple[Mode, ...] = ("split", "full")
    decoders = [CUDAGraphDecoder(model, state, ops, mode, max_context) for mode in modes]
    eager = _check_logits(decoders[0])  # Before its capture a decoder runs its steps eagerly.
    checked = [_check(decoder, eager) for decoder in decoders]
    state.set_position(0)
    for check in checked:
        found = "equal to" if check.exact else "different from"
        _LOG.info("cuda graph %s: %.2f ms/token, %s eager", check.decoder.mode, check.ms_per_token, found)
    exact = [check for check in checked if check.exact]
    if not exact:
        raise UserError("--cuda-graph: no mode reproduces the eager logits on this machine; run without it")
    return min(exact, key=lambda check: check.ms_per_token).decoder


def _check(decoder: CUDAGraphDecoder, eager: list[Tensor]) -> _Checked:
    decoder.capture()
    replayed = _check_logits(decoder)
    exact = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(eager, replayed, strict=True))
    started = time.perf_counter()
    _check_logits(decoder)[-1].cpu()
    return _Checked(decoder, exact, 1e3 * (time.perf_counter() - started) / len(eager))


@torch.inference_mode()
def _check_logits(decoder: CUDAGraphDecoder) -> list[Tensor]:
    """The logits of every step of a self-check, which leaves the position where it began: a capture needs room."""
    steps = min(_CHECK_STEPS, decoder.max_context)
    start = min(_CHECK_START, decoder.max_context - steps)
    vocabulary = decoder.model.embed.table_VE.shape[0]
    decoder.state.set_position(start)
    logits = [decoder.replay(7919 * step % vocabulary, start + step).clone() for step in range(steps)]
    decoder.state.set_position(start)
    return logits
