"""Decode as users run it: eagerly, or by captured graphs with the host running ahead; wall time
from token to token.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from dsv4.caches.rows import RowCache
from dsv4.caches.state import DecodeState
from dsv4.decode import CUDAGraphDecoder
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.measure.graph_profile import GraphProfile, profile_decoder
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.steps import RecordedSteps

DecodeMode = Literal["eager", "split", "full"]
DECODE_MODES: tuple[DecodeMode, ...] = get_args(DecodeMode)
# Tokens before the first one that counts: after them the host is as far ahead as it gets.
WARM_UP = 8


class DecodeModes:
    """The ways to decode with one engine, captured once. An engine with a decoder of its own is not
    measured.
    """

    def __init__(self, engine: Engine, modes: Sequence[DecodeMode] | None) -> None:
        """``modes`` None: all, and eager alone where there is nothing to capture. Raises
        ``UserError`` for a mode that captures then.
        """
        self.engine = engine
        if modes is None:
            modes = DECODE_MODES if isinstance(engine.steps, RecordedSteps) else ("eager",)
        self.capture_seconds: dict[str, float] = {}
        self._decoders = {mode: None if mode == "eager" else self._captured(mode) for mode in modes}

    def measure(self, position: int, tokens: int) -> dict[str, dict[str, float]]:
        """Median, mean and 90th percentile of the ms per token by mode, over ``tokens`` greedy
        tokens.

        Every mode starts at ``position``, whatever the caches hold; needs room for ``tokens`` + 8.
        """
        measured = {}
        for mode, decoder in self._decoders.items():
            self.engine.state.set_position(position)
            greedy = Sampler(SamplingParams(temperature=0))
            following = self.engine.following(0, greedy, tokens + WARM_UP, decoder)
            measured[mode] = summary(token_milliseconds(following)[WARM_UP - 1 :])
        return measured

    def profile(self, position: int) -> dict[str, GraphProfile]:
        """Where the time of one token goes in every mode that captures, behind ``position``."""
        profiles = {}
        for mode, decoder in self._decoders.items():
            if decoder is not None:
                self.engine.state.set_position(position)
                profiles[mode] = profile_decoder(self.engine, decoder)
        return profiles

    def _captured(self, mode: Literal["split", "full"]) -> CUDAGraphDecoder:
        steps = self.engine.steps
        if not isinstance(steps, RecordedSteps):
            raise UserError(f"--modes: found {mode!r} with the torch ops, expected 'eager'")
        started = time.perf_counter()
        decoder = CUDAGraphDecoder(steps, mode, self.engine.max_context)
        self.capture_seconds[mode] = round(time.perf_counter() - started, 2)
        return decoder


def token_milliseconds(tokens: Iterable[int]) -> list[float]:
    """Wall time between consecutive tokens, as they come."""
    arrivals = [time.perf_counter() for _ in tokens]
    return [1e3 * (second - first) for first, second in pairwise(arrivals)]


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, mean and 90th percentile."""
    return {
        "ms_per_token": round(statistics.median(milliseconds), 4),
        "ms_per_token_mean": round(statistics.mean(milliseconds), 4),
        "ms_per_token_p90": round(statistics.quantiles(milliseconds, n=10)[-1], 4),
    }


def against_floor(
    measured: dict[str, float], nbytes: int, bytes_per_second: float
) -> dict[str, Any]:
    """``measured`` with the rate at which ``nbytes`` of weights were read, and the time over that
    of reading them at ``bytes_per_second``, one after another.
    """
    median = measured["ms_per_token"]
    return {
        **measured,
        "weight_gb_per_s": round(nbytes / median * 1e-6, 1),
        "times_the_floor": round(median / (1e3 * nbytes / bytes_per_second), 3),
    }


def fill_caches(state: DecodeState) -> None:
    """Random rows of standard deviation 1 in every slot of every cache, quantised as the cache's
    own writes are.

    With them a step at any position costs what it costs behind a real prefill: selection included,
    which takes its time by the distribution of the scores. The compressors' rings keep what they
    hold.
    """
    generators = {device: torch.Generator(device).manual_seed(0) for device in state.devices}
    for layer in state.layers:
        caches = [
            layer.keys.ring,
            *(part.rows for part in (layer.compressed, layer.index) if part is not None),
        ]
        for cache in caches:
            _fill(cache, generators[cache.data.device])


def _fill(cache: RowCache, generator: torch.Generator) -> None:
    device = cache.data.device
    for start in range(0, cache.slots, 1 << 14):
        slots = torch.arange(start, min(start + (1 << 14), cache.slots), device=device)
        cache.write(
            slots, torch.randn((len(slots), cache.width), generator=generator, device=device)
        )
