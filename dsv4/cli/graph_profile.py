"""Time per kernel of decoding with captured graphs: a few tokens under torch's profiler, on the devices' own clocks."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from dsv4.cli.kernel_timeline import DeviceEvent, TokenTimeline, median_token, token_timelines
from dsv4.decode import CUDAGraphDecoder
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.layer_kinds import layer_kinds
from dsv4.sampling import Sampler, SamplingParams

_TOKENS = 24


@dataclass(frozen=True)
class GraphProfile:
    """The median of a few tokens."""

    mode: str
    tokens: int
    timeline: TokenTimeline

    def table(self) -> str:
        """For reading: kernels, gaps, hops, devices."""
        return self.timeline.table()

    def record(self, nodes: bool = True) -> dict[str, Any]:
        """The token for a JSON file, with or without every kernel in its place."""
        detail = {"nodes": self.timeline.node_records()} if nodes else {}
        return rounded({"mode": self.mode, "tokens": self.tokens, **self.timeline.record(), **detail})


def profile_decoder(engine: Engine, decoder: CUDAGraphDecoder) -> GraphProfile:
    """Decodes greedily behind the engine's position, or as near to it as the context has room, and looks at one token.

    The engine's sequence is lost. Raises ``UserError`` when the profiler recorded no whole token.
    """
    steps = min(_TOKENS, engine.max_context)
    engine.state.set_position(min(engine.position, engine.max_context - steps))
    following = decoder.generate(0, Sampler(SamplingParams(temperature=0), engine.ops), steps)
    for _ in range(steps // 3):
        next(following)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in following:
            pass
        for device in engine.state.devices:
            torch.cuda.synchronize(device)
    layers: defaultdict[int, list[int]] = defaultdict(list)
    for layer, device in enumerate(engine.devices):
        layers[device.index].append(layer)
    timelines = token_timelines(_device_events(profiler), layers, layer_kinds(engine.config))
    if not timelines:
        raise UserError(f"--profile: found no whole token in what was recorded of {steps} steps, expected some")
    return GraphProfile(decoder.mode, len(timelines), median_token(timelines))


def rounded(value: Any) -> Any:
    """The same lists and dicts with floats of two decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def kernel_name(name: str) -> str:
    """The function's own name: without result, namespace, template arguments and parameters; copies by their kind."""
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    plain = re.sub(r"\(anonymous namespace\)::", "", name)
    return re.split(r"[<(]", plain.removeprefix("void "), maxsplit=1)[0].rpartition("::")[2]


def _device_events(profiler: torch.profiler.profile) -> list[DeviceEvent]:
    recorded = (event for event in profiler.events() or () if event.device_type == DeviceType.CUDA)
    return [
        DeviceEvent(kernel_name(event.name), event.device_index, event.time_range.start, event.time_range.elapsed_us())
        for event in recorded
        if not event.is_user_annotation
    ]
