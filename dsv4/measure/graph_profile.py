"""Time per kernel of decoding with captured graphs: a few tokens under torch's profiler.

Graphs replay the recorded step, so the n-th kernel of a device's token is the n-th of its launches.
Ranks that share every layer have a timeline each.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.autograd import DeviceType

from dsv4.config import layer_kinds
from dsv4.decode import CUDAGraphDecoder
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.measure.kernel_timeline import (
    DeviceEvent,
    StepLaunch,
    TokenTimeline,
    median_token,
    token_timelines,
)
from dsv4.measure.profile_table import HEAD
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.lock_step import LockStep
from dsv4.step.parts import Part
from dsv4.step.recorded import RecordedStep

_WARM_UP = 8
# The first one has no token before it, from whose end its time could be counted.
_LEAST_TOKENS = 2
_TOKENS = 17


@dataclass(frozen=True)
class GraphProfile:
    """The median of a few tokens, as each rank has it."""

    mode: str
    tokens: int
    ranks: tuple[TokenTimeline, ...]

    def table(self) -> str:
        """For reading: kernels, gaps, hops, devices; of several ranks one behind the other."""
        if len(self.ranks) == 1:
            return self.ranks[0].table()
        return "\n".join(
            f"rank {rank}\n{timeline.table()}" for rank, timeline in enumerate(self.ranks)
        )

    def record(self, nodes: bool = True) -> dict[str, Any]:
        """The token for a JSON file, with or without every kernel in its place; of several ranks a
        list.
        """

        def recorded(timeline: TokenTimeline) -> dict[str, Any]:
            return timeline.record() | ({"nodes": timeline.node_records()} if nodes else {})

        found = [recorded(timeline) for timeline in self.ranks]
        token = found[0] if len(found) == 1 else {"ranks": found}
        return rounded({"mode": self.mode, "tokens": self.tokens, **token})


def profile_decoder(engine: Engine, decoder: CUDAGraphDecoder) -> GraphProfile:
    """Decodes greedily behind the engine's position, or as near to it as the context has room, and
    looks at one token.

    The engine's sequence is lost. Raises ``UserError`` when the devices executed another number of
    kernels than the step launches.
    """
    if engine.max_context < _LEAST_TOKENS:
        raise UserError("--profile: found a context of 1 token, expected room for 2")
    step = decoder.step(1)
    place = (engine.position, engine.max_context, step.recorded.dense_until)
    position, tokens = place_of_tokens(*place)
    dense = step.recorded.is_dense(position + tokens)
    greedy = Sampler(SamplingParams(temperature=0))
    _set_position(engine, position)
    for _ in decoder.singly(0, greedy, min(_WARM_UP, tokens)):
        pass
    _set_position(engine, position)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with (
        closing(decoder.singly(0, greedy, tokens)) as following,
        torch.profiler.profile(activities=activities, acc_events=True) as profiler,
    ):
        # The generator's end sets the position by a kernel, so it comes behind the profile.
        for _ in islice(following, tokens):
            pass
        _synchronize(engine)
    kinds = layer_kinds(engine.config)
    ranks = step.ranks if isinstance(step, LockStep) else (step,)
    launches = [step_launches(rank.recorded, kinds, dense) for rank in ranks]
    timelines = rank_timelines(_device_events(profiler), launches, tokens)
    return GraphProfile(decoder.mode, len(timelines[0]), tuple(map(median_token, timelines)))


def rank_timelines(
    events: Sequence[DeviceEvent], ranks: Sequence[Mapping[int, Sequence[StepLaunch]]], tokens: int
) -> list[list[TokenTimeline]]:
    """``token_timelines`` of every rank; several ranks are on devices of their own."""
    if len(ranks) == 1:
        return [token_timelines(events, ranks[0], tokens)]
    return [
        token_timelines([event for event in events if event.device in step], step, tokens)
        for step in ranks
    ]


def step_launches(
    recorded: RecordedStep, kinds: Sequence[str], dense: bool
) -> dict[int, list[StepLaunch]]:
    """The launches of a one-token step in order, by device index; ``dense``: of a dense one.

    ``kinds``: the kind of every layer.
    """
    launches: defaultdict[int, list[StepLaunch]] = defaultdict(list)
    for part in recorded.parts:
        if isinstance(part, Part):
            kind = HEAD if part.layer is None else kinds[part.layer]
            launches[part.device.index] += [
                StepLaunch(name, part.name, part.layer, kind)
                for _, name in recorded.launched(part, 1, dense)
            ]
    return dict(launches)


def rounded(value: Any) -> Any:
    """The same lists and dicts with floats of two decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def place_of_tokens(position: int, max_context: int, dense_until: int) -> tuple[int, int]:
    """Where to decode how many tokens: as near to ``position`` as there is room for steps that are
    all dense or none.
    """
    has_room = max_context - dense_until >= _LEAST_TOKENS
    begin = dense_until if position >= dense_until and has_room else 0
    end = max_context if begin == dense_until else min(dense_until, max_context)
    tokens = min(_TOKENS, end - begin)
    return min(position, end - tokens), tokens


def _set_position(engine: Engine, position: int) -> None:
    engine.state.set_position(position)
    _synchronize(engine)


def _synchronize(engine: Engine) -> None:
    for device in engine.state.all_devices:
        torch.cuda.synchronize(device)


def _device_events(profiler: torch.profiler.profile) -> list[DeviceEvent]:
    recorded = (event for event in profiler.events() or () if event.device_type == DeviceType.CUDA)
    return [
        DeviceEvent(
            event.name, event.device_index, event.time_range.start, event.time_range.elapsed_us()
        )
        for event in recorded
        if not event.is_user_annotation
    ]
