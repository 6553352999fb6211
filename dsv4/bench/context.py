"""``bench context``: a published geometry with random weights at growing positions: a long prompt
that is really computed, chunks and single tokens behind drawn caches, and memory by length.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dsv4.bench.context_memory import (
    PlacedGeometry,
    allocated_contexts,
    engine_memory,
    placed,
    planned_record,
)
from dsv4.bench.decode_modes import WARM_UP, DecodeMode, DecodeModes, fill_caches
from dsv4.bench.geometry import placement_record
from dsv4.bench.random_engine import build_random, random_ids, synchronize
from dsv4.checkpoint import Geometry, Layout, geometry_config
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.launch.target import Target
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.devices import engine_devices, table_on, with_device_defaults

# Spans that the chunks of the computed prompt are put together to, for one number each.
_SPANS = 16
# Chunks that are timed behind drawn caches.
_TIMED_CHUNKS = 4


@dataclass(frozen=True)
class ContextRun:
    """The run that ``bench context`` measures. ``layers`` None: all. ``engine`` has the longest
    context. ``prompt``: tokens that are computed; ``positions``: where chunks and tokens are timed
    behind drawn caches; ``lengths``: contexts whose memory is planned and allocated.
    """

    geometry: Geometry
    layout: Layout
    layers: int | None
    engine: EngineConfig
    prompt: int
    positions: tuple[int, ...]
    lengths: tuple[int, ...]
    decode_tokens: int
    modes: tuple[DecodeMode, ...] | None

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(geometry_config(self.geometry, self.layers))

    @property
    def max_context(self) -> int:
        """Tokens."""
        assert self.engine.max_context is not None
        return self.engine.max_context


def plan_geometry(run: ContextRun, gpu_memory: int) -> dict[str, Any]:
    """The memory of every length on H200 of ``gpu_memory`` bytes, which need not be there."""
    devices = engine_devices(run.engine, absent=True)
    engine = with_device_defaults(run.engine, devices)
    placement = placed(run.config, run.layout, engine, devices)
    targets = {device: Target.of_absent(device) for device in devices}
    alone = placement.ranks == 1
    layer_devices = placement.layer_devices if alone else placement.stages[0].devices
    geometry = PlacedGeometry(run.config, run.layout, engine, placement, targets)
    return {
        **_about(run, engine),
        "placement": placement_record(engine.parallel, layer_devices),
        "planned_bytes": planned_record(geometry.plans(CUDA_TABLE, run.lengths, gpu_memory)),
    }


def bench_context(run: ContextRun, write_text: Callable[[str], object]) -> dict[str, Any]:
    """Prefill, decode and memory by position. Prefill in ms from the end of one chunk to that of
    the next, which is what a long prompt costs per chunk. ``write_text`` gets each part of the
    result as it is there.
    """
    config = run.config
    devices = engine_devices(run.engine)
    settled = with_device_defaults(run.engine, devices)
    placement = placed(config, run.layout, settled, devices)
    check_positions(run, settled, len(placement.of_rank(0).devices))
    table = table_on(settled, placement.devices)
    targets = {device: Target.of(device) for device in placement.devices}
    geometry = PlacedGeometry(config, run.layout, settled, placement, targets)
    plans = geometry.plans(table, run.lengths)
    started = time.perf_counter()
    engine = build_random(config, run.engine, run.layout, table)
    result = {
        **_about(run, engine.engine_config),
        "native": engine.table.portable is not None,
        "placement": placement_record(run.engine.parallel, engine.devices),
        "build_seconds": round(time.perf_counter() - started, 1),
        "drawn_caches": "random rows of standard deviation 1, the position set",
        "decode_tokens": run.decode_tokens,
    }
    for name, value in _measured(run, engine):
        write_text(json.dumps({name: value}) + "\n")
        result[name] = value
    result["planned_bytes"] = planned_record(plans)
    result["allocated_bytes"] = allocated_contexts(engine, placement, run.lengths)
    return result


def _measured(run: ContextRun, engine: Engine) -> Iterator[tuple[str, Any]]:
    yield "memory_after_building", engine_memory(engine)
    yield "prefill_computed", computed_prefill(engine, run.prompt)
    modes = DecodeModes(engine, run.modes)
    yield "decode_behind_the_computed_prompt", modes.measure(run.prompt, run.decode_tokens)
    for state in engine.state.ranks:
        fill_caches(state)
    decode = {str(at): modes.measure(at, run.decode_tokens) for at in run.positions}
    yield "decode_behind_drawn_caches", decode
    yield "prefill_behind_drawn_caches", {str(at): chunks_at(engine, at) for at in run.positions}
    yield "memory_after_measuring", engine_memory(engine)


def computed_prefill(engine: Engine, tokens: int) -> dict[str, Any]:
    """A prompt of ``tokens`` random ids from position 0 on: seconds, and ms per chunk by span."""
    chunk = _chunk(engine)
    engine.reset()
    engine.prefill(random_ids(engine, min(2 * chunk, tokens), 1))
    engine.reset()
    ids = random_ids(engine, tokens, 0)
    synchronize(engine)
    started = time.perf_counter()
    ends = _prefill(engine, ids)
    seconds = time.perf_counter() - started
    milliseconds = chunk_milliseconds(ends, _ahead(engine))
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "spans": spans(milliseconds, chunk, max(1, len(ends) // _SPANS)),
    }


def chunks_at(engine: Engine, position: int) -> dict[str, float]:
    """Median ms per chunk from ``position`` on, and tokens per second by it."""
    chunk = _chunk(engine)
    count = min(_TIMED_CHUNKS + _ahead(engine), (engine.max_context - position) // chunk)
    engine.state.set_position(position)
    ends = _prefill(engine, random_ids(engine, count * chunk, position))
    median = statistics.median(chunk_milliseconds(ends, _ahead(engine)))
    return {
        "ms_per_chunk": round(median, 3),
        "tokens_per_second": round(1e3 * chunk / median, 1),
    }


def chunk_milliseconds(ends: list[float], ahead: int) -> list[float]:
    """ms from the end of each chunk to that of the next one: the first is that of chunk 1.

    ``ends[i]``: seconds at which the host, after it queued chunk i, had seen chunk i − ``ahead``
    end. The last ``ahead`` chunks are not seen.
    """
    seen = ends[ahead:]
    return [1e3 * (second - first) for first, second in pairwise(seen)]


def spans(milliseconds: list[float], chunk: int, length: int) -> list[dict[str, float]]:
    """Median ms per chunk of ``length`` consecutive chunks at a time; the first value is that of
    chunk 1. ``from`` and ``to`` in tokens.
    """
    found = []
    for first in range(0, len(milliseconds), length):
        part = milliseconds[first : first + length]
        median = statistics.median(part)
        found.append(
            {
                "from": chunk * (first + 1),
                "to": chunk * (first + 1 + len(part)),
                "ms_per_chunk": round(median, 3),
                "tokens_per_second": round(1e3 * chunk / median, 1),
            }
        )
    return found


def check_positions(run: ContextRun, engine: EngineConfig, devices: int) -> None:
    """Raises ``UserError`` for what does not fit the longest context: positions with the chunks
    behind them that are timed at least, and tokens; and for one that no position fits.
    """
    assert engine.prefill_chunk is not None
    behind = max((2 * devices + 2) * engine.prefill_chunk, run.decode_tokens + WARM_UP)
    room = run.max_context - behind
    if room < 1:
        # No position would do: the flag that is wrong is another one.
        expected = f"at least {behind + 1} (what is timed behind a position)"
        raise UserError(f"--max-context: found {run.max_context}, expected {expected}")
    for flag, most in (("--positions", max(run.positions)), ("--prompt", run.prompt)):
        if most > room:
            expected = f"at most {room} (--max-context less what follows)"
            raise UserError(f"{flag}: found {most}, expected {expected}")
    if max(run.lengths) > run.max_context:
        expected = f"at most {run.max_context} (--max-context)"
        raise UserError(f"--lengths: found {max(run.lengths)}, expected {expected}")


def _prefill(engine: Engine, ids: list[int]) -> list[float]:
    """The times at which ``chunk_milliseconds`` looks."""
    ends: list[float] = []
    engine.prefill(ids, lambda *_: ends.append(time.perf_counter()))
    synchronize(engine)
    return ends


def _ahead(engine: Engine) -> int:
    """Chunks that are in flight, as ``EngineInputs`` has them."""
    return 2 * len(engine.state.devices)


def _chunk(engine: Engine) -> int:
    chunk = engine.engine_config.prefill_chunk
    assert chunk is not None
    return chunk


def _about(run: ContextRun, engine: EngineConfig) -> dict[str, Any]:
    return {
        "geometry": run.geometry,
        "layout": run.layout,
        "layers": run.config.num_hidden_layers,
        "prefill_chunk": engine.prefill_chunk,
        "max_context": run.max_context,
    }
