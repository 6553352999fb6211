"""A step as graph replays, hand-offs and, in split mode, eager attention."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Literal

import torch

from dsv4.caches.state import DecodeState
from dsv4.on_failure import OnFailure
from dsv4.step.lock_step import LockStep
from dsv4.step.parts import AnyPart, Part
from dsv4.step.step import Step

Mode = Literal["split", "full"]
Streams = Mapping[torch.device, torch.cuda.Stream]
Pool = tuple[int, int]

_NAMED_BY_ITS_PARTS = ""


def capture_graph(
    stream: torch.cuda.Stream, pool: Pool, body: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """``body`` captured on ``stream``; memory that it allocates comes from ``pool``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), _no_garbage_collection():
        graph.capture_begin(pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]
        with OnFailure(_end_broken, graph):
            body()
        graph.capture_end()
    return graph


def _end_broken(graph: torch.cuda.CUDAGraph) -> None:
    # The body has raised: what ending its capture raises is less useful.
    with suppress(RuntimeError):
        graph.capture_end()


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


def graph_of(part: AnyPart, mode: Mode) -> str | None:
    """The name of the graph that holds a part; None: none does."""
    if not isinstance(part, Part) or (mode == "split" and part.kind == "attention"):
        return None
    if mode == "full" or part.layer is None:
        return _NAMED_BY_ITS_PARTS
    if part.kind == "projections":
        return f"layer {part.layer} graph A"
    return f"layer {part.layer} graph B" if part.kind == "experts" else part.name


def regions_of(parts: Sequence[AnyPart], mode: Mode) -> list[tuple[str | None, list[AnyPart]]]:
    """Parts that one graph holds, with its name; None: no graph does. They follow each other, or
    are all of a device, where nothing but kernels goes between devices.
    """
    if mode == "full" and all(isinstance(part, Part) for part in parts):
        devices = dict.fromkeys(map(part_device, parts))
        parts = [part for device in devices for part in parts if part_device(part) == device]
    regions: list[tuple[str | None, list[AnyPart]]] = []
    for (graph, _), found in groupby(parts, lambda part: (graph_of(part, mode), part_device(part))):
        run = list(found)
        regions.append((_name_of(run) if graph == _NAMED_BY_ITS_PARTS else graph, run))
    return regions


def _name_of(parts: Sequence[AnyPart]) -> str:
    """``layers 22 to 42, head, sample``, or ``22 layers from 0 to 42``."""
    captured = [part for part in parts if isinstance(part, Part)]
    layers = [*dict.fromkeys(part.layer for part in captured if part.layer is not None)]
    names = []
    if layers:
        follow = layers[-1] - layers[0] == len(layers) - 1
        some = "layers" if follow else f"{len(layers)} layers from"
        names = [f"{some} {layers[0]} to {layers[-1]}"]
    names += [part.kind for part in captured if part.layer is None and part.kind != "logits"]
    return ", ".join(dict.fromkeys(names))


def part_device(part: AnyPart) -> torch.device:
    """The device that queues a part."""
    return part.device if isinstance(part, Part) else part.source


class CapturedStep:
    """A step whose parts are replayed on ``streams``. ``regions`` names what is captured of a run
    with the choice of the next token, in order; ``model`` and ``with_choice``, each by whether the
    run is dense, queue the model, without and with that choice.
    """

    def __init__(
        self, step: Step, streams: Streams, mode: Mode, pool: Pool, max_context: int
    ) -> None:
        """The step must have run before: what is loaded at a first launch cannot be captured."""
        self.step = step
        self._streams = streams
        self._mode: Mode = mode
        self._pool = pool
        self._graphs: dict[tuple[Part, Part, bool], torch.cuda.CUDAGraph] = {}
        recorded = step.recorded
        self._all_parts = [*step.model_parts, *step.sample_parts]
        kinds = [recorded.is_dense(end) for end in recorded.ends(max_context)]
        self.model = {dense: self._capture(step.model_parts, dense) for dense in kinds}
        self.with_choice = {dense: self._capture(self._all_parts, dense) for dense in kinds}

    @property
    def regions(self) -> list[str]:
        """The names of what is captured, in order."""
        return [name for name, _ in regions_of(self._all_parts, self._mode) if name is not None]

    def run(self, end: int) -> None:
        """Queues the model on the streams, which the caller has made the current ones. ``end``: as
        of ``Step.run``.
        """
        self._queue(self.model[self.step.recorded.is_dense(end)])

    def run_and_sample(self, end: int) -> None:
        """Queues the model and the choice of the next token in the same way."""
        self._queue(self.with_choice[self.step.recorded.is_dense(end)])

    def _queue(self, actions: Sequence[Callable[[], object]]) -> None:
        with self.step.recorded.turn():
            if self._mode == "full":
                _all_or_none(actions)
                return
            for action in actions:
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
        """The graph of a region, one for all runs that do the same in it."""
        captured = [part for part in parts if isinstance(part, Part)]
        assert len(captured) == len(parts), "hand-offs are not captured"
        differs = any(map(self.step.recorded.differs_if_dense, captured))
        key = (captured[0], captured[-1], dense and differs)
        if key not in self._graphs:
            stream = self._streams[part_device(parts[0])]
            body = partial(self._run, captured, dense)
            self._graphs[key] = capture_graph(stream, self._pool, body)
        return self._graphs[key]

    def _run(self, parts: Sequence[Part], dense: bool) -> None:
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
        dense = self.step.recorded.is_dense(end)
        self._queue([rank.model[dense] for rank in self._ranks])

    def run_and_sample(self, end: int) -> None:
        """Queues the model and the choice of the next token, on every rank, in the same way."""
        dense = self.step.recorded.is_dense(end)
        self._queue([rank.with_choice[dense] for rank in self._ranks])

    def _queue(self, ranks: Sequence[Sequence[Callable[[], object]]]) -> None:
        self._state.begin_step(self.step.recorded.steps_begun)
        with self._state.turn():
            _interleave(ranks)


AnyCaptured = CapturedStep | CapturedRanks


def _interleave(ranks: Sequence[Sequence[Callable[[], object]]]) -> None:
    """Of each region all ranks or none."""
    for actions in zip(*ranks, strict=True):
        _all_or_none(actions)


def _all_or_none(actions: Iterable[Callable[[], object]]) -> None:
    """An interruption in between would leave devices waiting for each other."""
    waiting = iter(actions)
    try:
        for action in waiting:
            action()
    finally:
        for action in waiting:
            action()
