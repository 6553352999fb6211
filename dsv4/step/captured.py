"""A step as graph replays, hand-offs and, in split mode, eager attention."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
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
    """A step whose parts are replayed on ``streams``. ``regions`` names what is captured, in order;
    ``model``, by whether the run is dense, and ``choice`` queue the model, and the choice of the
    next token, in turn.
    """

    def __init__(
        self, step: Step, streams: Streams, mode: Mode, pool: Pool, max_context: int
    ) -> None:
        """The step must have run before: what is loaded at a first launch cannot be captured."""
        self.step = step
        self._streams = streams
        self._mode: Mode = mode
        self._pool = pool
        self._graphs: dict[tuple[Part, bool], torch.cuda.CUDAGraph] = {}
        recorded = step.recorded
        self.model = {
            dense: self._capture(step.model_parts, dense)
            for dense in map(recorded.is_dense, recorded.ends(max_context))
        }
        self.choice = self._capture(step.sample_parts, False)

    @property
    def regions(self) -> list[str]:
        """The names of what is captured, in order."""
        parts = [*self.step.model_parts, *self.step.sample_parts]
        return [name for name, _ in regions_of(parts, self._mode) if name is not None]

    def run(self, end: int) -> None:
        """Queues the model on the streams, which the caller has made the current ones. ``end``: as
        of ``Step.run``.
        """
        for action in self.model[self.step.recorded.is_dense(end)]:
            action()

    def sample(self) -> None:
        """Queues the choice of the next token in the same way."""
        for action in self.choice:
            action()

    def _capture(self, parts: Sequence[AnyPart], dense: bool) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = []
        for name, run in regions_of(parts, self._mode):
            if name is None:
                tokens = self.step.tokens
                actions += [partial(self.step.run_part, part, tokens, dense) for part in run]
            else:
                actions.append(self._graph(run, dense).replay)
        return actions

    def _graph(self, parts: Sequence[AnyPart], dense: bool) -> torch.cuda.CUDAGraph:
        """The graph of a region, one for both kinds of run where they do the same."""
        captured = [part for part in parts if isinstance(part, Part)]
        assert len(captured) == len(parts), "hand-offs are not captured"
        differs = any(map(self.step.recorded.differs_if_dense, captured))
        key = (captured[0], dense and differs)
        if key not in self._graphs:
            stream = self._streams[part_device(parts[0])]
            body = partial(self._queue, captured, dense)
            self._graphs[key] = capture_graph(stream, self._pool, body)
        return self._graphs[key]

    def _queue(self, parts: Sequence[Part], dense: bool) -> None:
        for part in parts:
            program = self.step.programs[part.device]
            program.run(self.step.tokens, part.start, part.stop, dense)


class CapturedRanks:
    """The captured steps of all ranks, each on a device of its own: replayed region by region."""

    def __init__(
        self,
        step: LockStep,
        state: DecodeState,
        streams: Streams,
        mode: Mode,
        pool: Pool,
        max_context: int,
    ) -> None:
        """As ``CapturedStep``. ``state``: of rank 0. Raises ``ValueError`` for ranks that share a
        device: a graph that waits for another rank would be in front of that rank's.
        """
        devices = [rank.recorded.head for rank in step.ranks]
        if len(set(devices)) < len(devices):
            raise ValueError(f"ranks: found {len(devices)} on {devices[0]}, expected one each")
        self.step = step
        self._state = state
        self._ranks = [CapturedStep(rank, streams, mode, pool, max_context) for rank in step.ranks]
        self.regions = self._ranks[0].regions

    def run(self, end: int) -> None:
        """Queues the model. All ranks get a region before any gets the next one. ``end``: as of
        ``Step.run``.
        """
        self._state.begin_step(self.step.recorded.steps_begun)
        dense = self.step.recorded.is_dense(end)
        _interleave([rank.model[dense] for rank in self._ranks])

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
