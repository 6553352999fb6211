"""``bench engine --geometry``: the engine on random weights of a published geometry, any number of
its layers.

The weights are drawn on the devices, so one GPU can time a slice of a model that does not fit on
it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from dsv4.bench.decode_modes import DecodeMode, DecodeModes, against_floor, fill_caches
from dsv4.bench.device import copy_ceiling
from dsv4.bench.drafts import DraftRun, bench_drafts, drafted_geometry
from dsv4.bench.geometry_bytes import token_bytes
from dsv4.bench.layer_times import LayerTimes
from dsv4.bench.random_engine import build_random, random_ids, synchronize
from dsv4.bench.skew import bench_skew
from dsv4.bench.skew import table as skew_table
from dsv4.caches.allocation import prefill_tokens
from dsv4.checkpoint import Geometry, Layout, geometry_config
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import Table
from dsv4.step.steps import RecordedSteps

# Tokens behind those that are asked for: profiles and drafts are measured on some.
_FEWEST_BEHIND = 256
_ROOM = 64


@dataclass(frozen=True)
class GeometryRun:
    """The run that ``bench engine --geometry`` measures. ``layers`` None: all. Positions and
    prompts in tokens.

    ``engine`` says where and how; its ``max_context`` is set to what the prompts and positions
    need. ``modes`` None: all that the op table has. ``table`` None: the one that ``engine`` asks
    for. ``ranks``: that the layers are cut for, where two GPUs stand for more of them
    (``Placement.absent_ranks``). ``skew``: of two ranks, how far they are apart
    (``dsv4.bench.skew``). ``draft``: the module to measure, which every step runs along.
    """

    geometry: Geometry
    layout: Layout
    layers: int | None
    engine: EngineConfig
    prompts: tuple[int, ...]
    positions: tuple[int, ...]
    decode_tokens: int
    modes: tuple[DecodeMode, ...] | None
    profile: bool
    table: Table | None = None
    ranks: int | None = None
    skew: bool = False
    draft: DraftRun | None = None

    @property
    def config(self) -> ModelConfig:
        """That of the geometry, with the keys of the module."""
        raw = geometry_config(self.geometry, self.layers)
        return ModelConfig.from_dict(
            raw if self.draft is None else drafted_geometry(raw, self.draft.kind)
        )

    @property
    def max_context(self) -> int:
        """Tokens."""
        return max((*self.prompts, *self.positions)) + self._behind

    def check_lengths(self) -> None:
        """Raises ``UserError`` for more tokens than the model was made for."""
        limit = self.config.max_position_embeddings
        most = limit - self._behind
        if most < 1:
            expected = f"at most {limit - _ROOM - 1}"
            raise UserError(f"--decode-tokens: found {self.decode_tokens}, expected {expected}")
        for flag, lengths in (("--prompts", self.prompts), ("--positions", self.positions)):
            if max(lengths) > most:
                found = f"found {max(lengths)} with --decode-tokens {self.decode_tokens}"
                raise UserError(f"{flag}: {found}, expected at most {most}")

    @property
    def _behind(self) -> int:
        """Tokens behind the longest prompt or the last position."""
        return max(self.decode_tokens, _FEWEST_BEHIND) + _ROOM


def bench_geometry(run: GeometryRun, write_text: Callable[[str], object]) -> dict[str, Any]:
    """Prefill tok/s by prompt length; by position, decode ms/token of every mode and µs per layer
    kind; the bytes that a token needs, GB/s and how many times the floor, which is reading them one
    after another at the measured copy rate. With ``profile``, the kernels of one token of every
    captured mode, whose tables ``write_text`` gets.
    """
    config = run.config
    room = run.max_context
    ceiling = copy_ceiling()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    sized = replace(run.engine, max_context=room)
    mtp = None if run.draft is None else run.draft.kind
    engine = build_random(config, sized, run.layout, run.table, run.ranks, mtp)
    build_seconds = time.perf_counter() - started
    ranks = run.ranks or (run.engine.gpus if run.engine.parallel == "tensor" else 1)
    nbytes = sum(token_bytes(config, run.layout, ranks).values())
    build_peak = _peak_gigabytes(engine)
    prefill = {str(length): round(prefill_rate(engine, length), 1) for length in run.prompts}
    for state in engine.state.ranks:
        fill_caches(state)
    modes = DecodeModes(engine, run.modes)
    decode = {
        str(at): _decode(modes, run, at, _bytes_at(engine, run, ranks, at), ceiling)
        for at in run.positions
    }
    memory = _peak_gigabytes(engine)
    for at, by_kind in _layer_microseconds(engine, run.positions).items():
        decode[at]["us_per_layer"] = by_kind
    drafts = {}
    if run.draft is not None:
        drafts = bench_drafts(engine, run.layout, run.draft, run.positions[0], ceiling)
    profiles = modes.profile(run.positions[0]) if run.profile else {}
    for mode, profile in profiles.items():
        write_text(f"{mode}\n{profile.table()}\n")
    skew = {}
    if run.skew:
        skew = {"skew": bench_skew(engine, run.positions[0])}
        write_text(f"{skew_table(skew['skew'])}\n")
    return {
        "geometry": run.geometry,
        "layout": run.layout,
        "layers": config.num_hidden_layers,
        "native": engine.table.portable is not None,
        "placement": placement_record(run.engine.parallel, engine.devices) | _cut(run),
        "prefill_chunk": engine.engine_config.prefill_chunk,
        "prefill_activations": engine.engine_config.prefill_activations,
        "max_context": room,
        "build_seconds": round(build_seconds, 1),
        "capture_seconds": modes.capture_seconds,
        "copy_gb_per_s": round(ceiling / 1e9, 1),
        "weight_gb_per_token": round(nbytes / 1e9, 4),
        "floor_ms": round(1e3 * nbytes / ceiling, 4),
        "prefill_tokens_per_second": prefill,
        "caches": "random rows of standard deviation 1, the position set: no prefill before decode",
        "decode_tokens": run.decode_tokens,
        "decode": decode,
        "build_peak_gb": build_peak,
        "memory_gb": memory,
        "workspace_bytes": _workspace_bytes(engine),
        "drafts": drafts,
        "profile": {mode: profile.record(nodes=False) for mode, profile in profiles.items()},
        **skew,
    }


def placement_record(parallel: str, layer_devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """The placement, the layers of each device, and how often a token's streams change devices; of
    tensor parallelism the devices of the ranks.
    """
    if parallel == "tensor":
        return {"parallel": parallel, "ranks": [str(device) for device in layer_devices]}
    return {
        "parallel": parallel,
        "layers": {
            str(device): layer_devices.count(device) for device in dict.fromkeys(layer_devices)
        },
        "hops": sum(first != second for first, second in pairwise(layer_devices)),
    }


def _cut(run: GeometryRun) -> dict[str, int]:
    """For how many ranks the layers are cut, where some are absent."""
    return {} if run.ranks is None else {"cut_for_ranks": run.ranks}


def prefill_rate(engine: Engine, length: int) -> float:
    """Tokens per second of the faster of two prefills, each of another length than the one before,
    as prompts are; a first one compiles.
    """
    rates = []
    for seed, count in enumerate((length, max(1, length - 1), length)):
        ids = random_ids(engine, count, seed)
        engine.reset()
        synchronize(engine)
        started = time.perf_counter()
        engine.prefill(ids)
        synchronize(engine)
        rates.append(count / (time.perf_counter() - started))
    return max(rates[1:])


def _bytes_at(engine: Engine, run: GeometryRun, ranks: int, position: int) -> int:
    """Weight bytes that a token has to read from ``position`` on."""
    steps = engine.steps
    end = position + run.decode_tokens
    dense = isinstance(steps, RecordedSteps) and steps.step(1).recorded.is_dense(end)
    return sum(token_bytes(engine.config, run.layout, ranks, dense).values())


def _decode(
    modes: DecodeModes, run: GeometryRun, position: int, nbytes: int, ceiling: float
) -> dict[str, Any]:
    measured = modes.measure(position, run.decode_tokens).items()
    return {mode: against_floor(times, nbytes, ceiling) for mode, times in measured}


def _layer_microseconds(engine: Engine, positions: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Median µs of one block by kind at every position; nothing for the torch ops, nor for ranks,
    which wait for each other.
    """
    alone = not engine.state.others
    if not isinstance(engine.steps, RecordedSteps) or not alone:
        return {str(position): {} for position in positions}
    times = LayerTimes(engine.config, engine.steps)
    return {str(position): times.measure(position) for position in positions}


def _workspace_bytes(engine: Engine) -> dict[str, dict[str, int]]:
    """Bytes of the buffers of the one-token decode step and of the prefill step, by tokens and
    device.
    """
    if not isinstance(engine.steps, RecordedSteps):
        return {}
    longest = prefill_tokens(engine.engine_config, engine.max_context)
    sizes = {
        str(tokens): engine.steps.step(tokens).recorded.workspace_bytes()
        for tokens in sorted({1, longest})
    }
    return {
        tokens: {str(device): nbytes for device, nbytes in by_device.items()}
        for tokens, by_device in sizes.items()
    }


def _peak_gigabytes(engine: Engine) -> dict[str, float]:
    """The most that was allocated on each device since this was last asked, in GB."""
    peaks = {}
    for device in engine.state.all_devices:
        peaks[str(device)] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
        torch.cuda.reset_peak_memory_stats(device)
    return peaks
