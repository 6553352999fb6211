"""``bench engine --geometry``: the engine on random weights of a published geometry, any number of its layers.

The weights are drawn on the device, so one GPU can time a slice of a model that does not fit on it.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dsv4.bench.device import capture, copy_ceiling, replay_microseconds
from dsv4.checkpoint import Geometry, Layout, geometry_config, synthetic_weights
from dsv4.checkpoint.layouts import format_in
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.layers.weights import ReadOnce
from dsv4.parameters import Role, layer_of, parameters
from dsv4.placement import Placement, engine_devices
from dsv4.quant import packed_bytes

_KINDS = {0: "SWA", 4: "CSA", 128: "HCA"}


@dataclass(frozen=True)
class GeometryRun:
    """What ``bench engine --geometry`` measures. ``layers`` None: all. Positions and prompts in tokens."""

    geometry: Geometry
    layout: Layout
    layers: int | None
    gpus: int
    prompts: tuple[int, ...]
    positions: tuple[int, ...]
    decode_tokens: int
    prefill_chunk: int
    ops: Literal["auto", "torch", "cuda"] = "auto"


def bench_geometry(run: GeometryRun) -> dict[str, Any]:
    """Prefill tok/s by prompt length; decode ms/token by position, eager and as one replayed graph; µs per layer kind;
    bytes a token needs, GB/s and share of the floor that the measured copy rate sets.
    """
    config = ModelConfig.from_dict(geometry_config(run.geometry, run.layers))
    room = max((*run.prompts, *run.positions)) + 4 * run.decode_tokens + 64
    engine_config = EngineConfig(
        device="cuda", gpus=run.gpus, max_context=room, prefill_chunk=run.prefill_chunk, ops=run.ops
    )
    ceiling = copy_ceiling()
    torch.cuda.empty_cache()
    engine, build_seconds = _build(config, engine_config, run.layout)
    nbytes = token_bytes(config, run.layout)
    decode = {str(at): _decode(engine, at, run.decode_tokens, nbytes, ceiling) for at in run.positions}
    return {
        "geometry": run.geometry,
        "layout": run.layout,
        "layers": config.num_hidden_layers,
        "build_seconds": round(build_seconds, 1),
        "copy_gb_per_s": round(ceiling / 1e9, 1),
        "weight_gb_per_token": round(sum(nbytes.values()) / 1e9, 4),
        "floor_ms": round(1e3 * sum(nbytes.values()) / ceiling, 4),
        "prefill_tokens_per_second": {str(length): round(_prefill(engine, length), 1) for length in run.prompts},
        "decode": decode,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def token_bytes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Weight bytes one decoded token has to read, by "embedding and head" and layer kind (summed over its layers)."""
    totals: defaultdict[str, int] = defaultdict(int)
    for parameter in parameters(config).values():
        format = format_in(layout, parameter)
        if parameter.name.startswith("embed.") or parameter.role is Role.TABLE:
            continue
        nbytes = 4 * torch.Size(parameter.shape).numel() if format is None else packed_bytes(format, parameter.shape)
        if parameter.role is Role.EXPERT:
            nbytes = nbytes * config.num_experts_per_tok // config.n_routed_experts
        layer = layer_of(parameter.name)
        totals["head" if layer is None else _KINDS[config.compress_ratios[layer]]] += nbytes
    return dict(totals)


def _build(config: ModelConfig, engine_config: EngineConfig, layout: Layout) -> tuple[Engine, float]:
    started = time.perf_counter()
    layer_bytes = [1] * config.num_hidden_layers
    placement = Placement.pipeline(layer_bytes, engine_devices(engine_config))
    weights = synthetic_weights(config, layout, 0, placement.device_of)
    engine = Engine(config, engine_config, ReadOnce(weights), placement)
    torch.cuda.synchronize()
    return engine, time.perf_counter() - started


def _prefill(engine: Engine, length: int) -> float:
    """Tokens per second of the faster of two prefills; the first compiles."""
    seconds = []
    for seed in range(3):
        ids = _random_ids(engine, length, seed)
        engine.reset()
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.prefill(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return length / min(seconds[1:])


def _decode(engine: Engine, position: int, tokens: int, nbytes: dict[str, int], ceiling: float) -> dict[str, Any]:
    engine.reset()
    engine.prefill(_random_ids(engine, position, 1))
    eager = _eager_milliseconds(engine, tokens)
    graph = _graph_milliseconds(engine, tokens)
    total = sum(nbytes.values())
    return {
        "eager_ms_per_token": round(eager, 4),
        "graph_ms_per_token": round(graph, 4),
        "weight_gb_per_s": round(total / graph * 1e-6, 1),
        "times_the_floor": round(graph / (1e3 * total / ceiling), 3),
        "us_per_layer": _layer_microseconds(engine),
    }


def _eager_milliseconds(engine: Engine, tokens: int) -> float:
    """Median wall time of a decode step whose token the host waits for."""
    seconds = []
    for token in _random_ids(engine, tokens, 2):
        started = time.perf_counter()
        int(engine.ops.argmax_token(engine.decode([token])[0]))
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


@torch.inference_mode()
def _graph_milliseconds(engine: Engine, tokens: int) -> float:
    """Median time of the same step replayed as one CUDA graph: the kernels alone, on the token's own next position."""
    token_1 = torch.tensor(_random_ids(engine, 1, 3), device=engine.devices[0])

    def step() -> None:
        hidden_TE = engine.model(token_1, engine.state)
        engine.ops.argmax_token(engine.model.head.logits(hidden_TE)[0])

    graph = capture([step])
    return 1e-3 * statistics.median(replay_microseconds(graph, tokens))


@torch.inference_mode()
def _layer_microseconds(engine: Engine) -> dict[str, float]:
    """Median µs of one block by kind, hash routing apart: eight blocks of a kind (or all there are) in one graph."""
    config, device = engine.config, engine.devices[0]
    token_1 = torch.tensor(_random_ids(engine, 1, 4), device=device)
    position_1 = torch.full((1,), engine.position, dtype=torch.int64, device=device)
    streams = torch.randn((1, config.hc_mult, config.hidden_size), device=device).to(torch.bfloat16)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for layer, (ratio, hashed) in enumerate(zip(config.compress_ratios, config.hash_layers, strict=True)):
        if engine.devices[layer] == device:
            kinds[_KINDS[ratio] + (" hash" if hashed else "")].append(layer)
    measured = {}
    for kind, layers in kinds.items():
        blocks = [(engine.model.blocks[layer], engine.state.layers[layer]) for layer in layers[:8]]
        calls = [lambda b=block, s=state: b(streams, token_1, position_1, s) for block, state in blocks]
        measured[kind] = round(statistics.median(replay_microseconds(capture(calls), 20)) / len(calls), 2)
    return measured


def _random_ids(engine: Engine, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(engine.config.vocab_size, (count,), generator=generator).tolist()
