"""A capture on stand-ins for torch's graphs: what is around it, and how one that fails ends."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.step import captured
from dsv4.step.captured import CapturedStep, capture_graph, regions_of
from dsv4.step.parts import Part, Transfer
from tests.step.planned_model import GPUS

STREAM: Any = SimpleNamespace(device=GPUS[1])


class FakeGraph:
    """Notes where a capture begins and ends."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.is_broken = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.log.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.log.append("end")
        if self.is_broken:
            raise RuntimeError("the capture was invalidated")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
    """That of the next capture; its log has the current device and stream too."""
    made = FakeGraph()

    def current(what: object) -> Any:
        @contextmanager
        def entered() -> Iterator[None]:
            made.log.append(what)
            yield
            made.log.append(("not", what))

        return entered()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: current("stream"))
    return made


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether Python looks for garbage, before a capture and behind it."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_a_body_is_captured_on_its_stream_while_no_garbage_is_looked_for(
    graph: FakeGraph, collects: bool
) -> None:
    capture: Any = capture_graph(STREAM, (1, 2), lambda: graph.log.append(gc.isenabled()))
    assert capture is graph
    assert gc.isenabled() == collects
    begin = ("begin", (1, 2), "thread_local")
    around = [GPUS[1], "stream", begin, False, "end", ("not", "stream"), ("not", GPUS[1])]
    assert graph.log == around


def test_a_body_that_fails_ends_its_capture_and_says_why(graph: FakeGraph, collects: bool) -> None:
    """What ending it raises is less useful."""
    graph.is_broken = True

    def body() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_graph(STREAM, (1, 2), body)
    assert graph.log[3:] == ["end"]
    assert gc.isenabled() == collects


def test_a_capture_that_was_invalidated_is_no_graph(graph: FakeGraph) -> None:
    graph.is_broken = True
    with pytest.raises(RuntimeError, match="the capture was invalidated"):
        capture_graph(STREAM, (1, 2), lambda: None)
    assert graph.log.count("end") == 1


def test_parts_between_hand_offs_stay_in_their_order() -> None:
    """Else a device would wait for streams that nobody has sent yet."""
    streams = torch.empty(1)
    parts = [
        Part("experts", GPUS[0], 0, 0, 1),
        Transfer(GPUS[0], GPUS[1], streams),
        Part("experts", GPUS[1], 1, 0, 1),
        Transfer(GPUS[1], GPUS[0], streams),
        Part("head", GPUS[0], None, 1, 2),
    ]
    assert [run for _, run in regions_of(parts, "full")] == [[part] for part in parts]


def test_a_graph_is_captured_once_on_its_own_stream_and_replayed_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []

    def capture(stream: Any, pool: object, body: object) -> Any:
        log.append(("captured", stream))
        return SimpleNamespace(replay=lambda: log.append(("replayed", stream)))

    @contextmanager
    def turn() -> Iterator[None]:
        log.append("turn")
        yield
        log.append("end of turn")

    recorded = SimpleNamespace(
        is_dense=lambda end: end <= 100,
        ends=lambda most: [100, most],
        differs_if_dense=lambda part: part.kind == "projections",
        turn=turn,
        head=GPUS[1],
    )
    parts = [Part("projections", GPUS[0], 0, 0, 1), Part("experts", GPUS[1], 1, 0, 1)]
    step: Any = SimpleNamespace(recorded=recorded, model_parts=parts, sample_parts=[])
    monkeypatch.setattr(captured, "capture_graph", capture)
    streams: Any = {GPUS[0]: "first", GPUS[1]: "second"}
    made = CapturedStep(step, streams, "split", (0, 0), 5000)
    assert log == [("captured", name) for name in ("first", "second", "first")]
    log.clear()
    made.run(100)
    assert log == ["turn", ("replayed", "first"), ("replayed", "second"), "end of turn"]
