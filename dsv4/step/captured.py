"""A step as graph replays, hand-offs and, in split mode, eager attention."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from typing import Literal

import torch

from dsv4.caches.state import DecodeState
from dsv4.step.lock_step import LockStep
from dsv4.step.parts import AnyPart, Part
from dsv4.step.step import Step

Mode = Literal["split", "full"]
Streams = Mapping[torch.device, torch.cuda.Stream]
Pool = tuple[int, int]


def capture_graph(
    stream: torch.cuda.Stream, pool: Pool, body: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """``body`` captured on ``stream``; memory that it allocates comes from ``pool``."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(stream.device),
        torch.cuda.stream(stream),
        _no_garbage_collection(),
        ExitStack() as stack,
    ):
        graph.capture_begin(pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]

        def end(failed: type[BaseException] | None, *_: object) -> None:
            # Keep the body's exception: ending a broken capture raises a less useful one.
            with suppress(RuntimeError) if failed else nullcontext():
                graph.capture_end()

        stack.push(end)
        body()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing the memory of an older graph in the middle of a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def region_of(part: AnyPart, mode: Mode) -> str | None:
    """The graph that a part belongs to; None: it is not captured."""
    if not isinstance(part, Part) or (mode == "split" and part.kind == "attention"):
        return None
    if part.kind == "logits":
        return "head"
    if part.layer is None:
        return part.name
    if mode == "full":
        return f"layers on {part.device}"
    if part.kind == "projections":
        return f"layer {part.layer} graph A"
    return f"layer {part.layer} graph B" if part.kind == "experts" else part.name


def regions_of(parts: Sequence[AnyPart], mode: Mode) -> list[tuple[str | None, list[AnyPart]]]:
    """Consecutive parts by region, those of a full graph named by their layers."""
    regions = []
    for (name, _), found in groupby(parts, lambda part: (region_of(part, mode), part_device(part))):
        run = list(found)
        layers = [part.layer for part in run if isinstance(part, Part) and part.layer is not None]
        if name is not None and mode == "full" and layers:
            name = f"layers {layers[0]} to {layers[-1]}"
        regions.append((name, run))
    return regions


def part_device(part: AnyPart) -> torch.device:
    """The device that queues a part."""
    return part.device if isinstance(part, Part) else part.source


class CapturedStep:
    """A step whose parts are replayed on ``streams``. ``regions`` names what was captured, in
    order; ``model`` and ``choice`` queue the model, and the choice of the next token, in turn.
    """

    def __init__(self, step: Step, streams: Streams, mode: Mode, pool: Pool) -> None:
        """The step must have run before: what is loaded at a first launch cannot be captured."""
        self.step = step
        self.regions: list[str] = []
        self._streams = streams
        self._pool = pool
        self.model = self._capture(step.model_parts, mode)
        self.choice = self._capture(step.sample_parts, mode)

    def run(self) -> None:
        """Queues the model on the streams, which the caller has made the current ones."""
        for action in self.model:
            action()

    def sample(self) -> None:
        """Queues the choice of the next token in the same way."""
        for action in self.choice:
            action()

    def _capture(self, parts: Sequence[AnyPart], mode: Mode) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = []
        for name, run in regions_of(parts, mode):
            if name is None:
                actions += [lambda part=part: self._eager(part) for part in run]
                continue
            graph = capture_graph(
                self._streams[part_device(run[0])], self._pool, lambda run=run: self._queue(run)
            )
            self.regions.append(name)
            actions.append(graph.replay)
        return actions

    def _eager(self, part: AnyPart) -> None:
        self.step.run_part(part, self.step.tokens)

    def _queue(self, parts: Sequence[AnyPart]) -> None:
        for part in parts:
            assert isinstance(part, Part), "hand-offs are not captured"
            self.step.programs[part.device].run(self.step.tokens, part.start, part.stop)


class CapturedRanks:
    """The captured steps of all ranks, each on a device of its own: replayed region by region."""

    def __init__(
        self, step: LockStep, state: DecodeState, streams: Streams, mode: Mode, pool: Pool
    ) -> None:
        """As ``CapturedStep``. ``state``: of rank 0. Raises ``ValueError`` for ranks that share a
        device: a graph that waits for another rank would be in front of that rank's.
        """
        devices = [rank.recorded.head for rank in step.ranks]
        if len(set(devices)) < len(devices):
            raise ValueError(f"ranks: found {len(devices)} on {devices[0]}, expected one each")
        self.step = step
        self._state = state
        self._ranks = [CapturedStep(rank, streams, mode, pool) for rank in step.ranks]
        self.regions = self._ranks[0].regions

    def run(self) -> None:
        """Queues the model. All ranks get a region before any gets the next one."""
        self._state.begin_step(self.step.recorded.steps_begun)
        _interleave([rank.model for rank in self._ranks])

    def sample(self) -> None:
        """Queues the choice of the next token, on every rank."""
        _interleave([rank.choice for rank in self._ranks])


AnyCaptured = CapturedStep | CapturedRanks


def _interleave(ranks: Sequence[Sequence[Callable[[], object]]]) -> None:
    """Of each region all ranks or none: an interruption would leave some waiting for the others."""
    for actions in zip(*ranks, strict=True):
        waiting = iter(actions)
        try:
            for action in waiting:
                action()
        finally:
            for action in waiting:
                action()
