"""In what order a step queues its items and hand-offs, eagerly and by replays, on stand-ins for the
device: every item once, whatever is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from torch import Tensor

from dsv4.config import CSA_RATIO
from dsv4.layers.values import value_names
from dsv4.step import captured
from dsv4.step.captured import CapturedStep, Mode, part_device, regions_of
from dsv4.step.parts import Part
from dsv4.step.step import Step
from dsv4.trace.steps import ShownValues
from tests.step.planned_model import (
    GPUS,
    PlannedModel,
    compute_parts,
    demo,
    fake_step,
    geometry,
    items_of,
    runs,
)

MODES: tuple[Mode, ...] = get_args(Mode)
PLANNED = {
    "flash, 1 GPU": lambda: geometry("v4-flash", layers=9),
    "flash, 3 GPUs": lambda: geometry("v4-flash", layers=9, gpus=3),
    "pro, 8 GPUs": lambda: geometry("v4-pro", layers=9, gpus=8),
    "round robin": lambda: geometry("v4-flash", layers=9, gpus=2, round_robin=True),
    "far apart": lambda: without_channels(geometry("v4-flash", layers=9, gpus=3)),
    "demo": lambda: demo(2),
}
STREAMS: Any = dict.fromkeys(GPUS)
# Where the indexer has nothing to choose, and where it has.
NEAR = 100
FAR = 5000


def without_channels(planned: PlannedModel) -> PlannedModel:
    """Of devices that do not reach each other's memory."""
    return replace(planned, state=replace(planned.state, channels=None))


@pytest.fixture(scope="module", params=PLANNED)
def planned(request: pytest.FixtureRequest) -> PlannedModel:
    return PLANNED[request.param]()


def dense_items_of(step: Step) -> list[tuple[Any, ...]]:
    """Those of the model's parts that a dense run queues."""
    recordings = step.recorded.recordings
    return [
        (device, at)
        for device, at in items_of(step.model_parts)
        if not isinstance(at, int) or runs(recordings[device].items[at], dense=True)
    ]


def without_drains(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry[0] != "drain"]


def test_an_eager_step_queues_every_item_and_hand_off_once(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = planned.record(1)
    step, log, hand_offs = fake_step(planned, recorded, monkeypatch)
    step.run(1)
    step.sample()
    assert without_drains(log) == items_of(recorded.parts)
    log.clear()
    step.run(1, NEAR)
    assert without_drains(log) == dense_items_of(step)
    assert all(hand_off.rows == [1] * len(hand_off.rows) for hand_off in hand_offs.values())


def test_a_shorter_chunk_hands_off_its_own_rows(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, log, hand_offs = fake_step(planned, planned.record(512), monkeypatch)
    step.run(100)
    assert without_drains(log) == items_of(step.model_parts)
    assert all(set(hand_off.rows) == {100} for hand_off in hand_offs.values())


def test_arrivals_drain_right_behind_the_part_that_reads_them_last(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = planned.record(1)
    step, log, _ = fake_step(planned, recorded, monkeypatch)
    step.run(1)
    found = [(log[at - 1], entry) for at, entry in enumerate(log) if entry[0] == "drain"]
    expected = [
        ((part.device, part.stop - 1), ("drain", part.drains, part.device))
        for part in compute_parts(recorded)
        if part.drains is not None
    ]
    assert found == expected
    # A hand-off is drained before the next one between the same devices.
    for ends in planned.state.arrivals:
        order = [entry[0] == "drain" for entry in log if entry[-2:] == ends and entry[0] != ends[1]]
        assert order == [False, True] * (len(order) // 2)


def is_a_graph_each(planned: PlannedModel, mode: Mode) -> bool:
    """Whether every device has one graph, which waits for kernels of the others alone."""
    return mode == "full" and planned.state.channels is not None


def by_device(entries: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """In the order of their devices, the first one first."""
    devices = list(dict.fromkeys(entry[0] for entry in entries))
    return sorted(entries, key=lambda entry: devices.index(entry[0]))


class FakeGraph:
    """Replays what its body queued."""

    def __init__(self, log: list[Any], body: Callable[[], object]) -> None:
        before = len(log)
        body()
        self._items = log[before:]
        self._log = log

    def replay(self) -> None:
        self._log += self._items


def capture(
    mode: Mode,
    step: Step,
    log: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    max_context: int = FAR,
) -> CapturedStep:
    """``step`` captured on stand-ins; the log is empty afterwards."""

    def capture_graph(_stream: object, _pool: object, body: Callable[[], object]) -> FakeGraph:
        return FakeGraph(log, body)

    monkeypatch.setattr(captured, "capture_graph", capture_graph)
    made = CapturedStep(step, STREAMS, mode, (0, 0), max_context)
    log.clear()
    return made


@pytest.mark.parametrize("mode", MODES)
def test_replays_queue_every_item_and_hand_off_once(
    planned: PlannedModel, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, log, _ = fake_step(planned, planned.record(1), monkeypatch)
    captured_step = capture(mode, step, log, monkeypatch)
    queued = by_device if is_a_graph_each(planned, mode) else list
    captured_step.run(FAR)
    assert without_drains(log) == queued(items_of(step.model_parts))
    log.clear()
    captured_step.run(NEAR)
    assert without_drains(log) == queued(dense_items_of(step))
    log.clear()
    sampled = items_of(step.sample_parts)
    captured_step.run_and_sample(FAR)
    assert without_drains(log) == queued([*items_of(step.model_parts), *sampled])
    log.clear()
    captured_step.run_and_sample(NEAR)
    assert without_drains(log) == queued([*dense_items_of(step), *sampled])


@pytest.mark.parametrize("mode", MODES)
def test_an_interruption_leaves_no_device_waiting(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full mode the graph of every device is queued; in split mode nobody waits for what is
    not.
    """
    planned = PLANNED["flash, 3 GPUs"]()
    step, log, _ = fake_step(planned, planned.record(1), monkeypatch)
    captured_step = capture(mode, step, log, monkeypatch)
    actions = captured_step.model[False]
    first = actions[0]

    def interrupted() -> None:
        first()
        raise KeyboardInterrupt

    actions[0] = interrupted
    with pytest.raises(KeyboardInterrupt):
        captured_step.run(FAR)
    queued = by_device(items_of(step.model_parts))
    assert log == (queued if mode == "full" else queued[: len(log)])


def test_what_a_dense_run_does_as_well_is_captured_once(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In split mode everything but Graph A of layers with an indexer, and the end of the head, that
    one run has with the choice of a token; what never runs is not captured at all.
    """
    step, log, _ = fake_step(planned, planned.record(1), monkeypatch)
    captured_step = capture("split", step, log, monkeypatch)
    indexers = sum(ratio == CSA_RATIO for ratio in planned.config.compress_ratios)
    with_choice = 1
    assert len(captured_step._graphs) == len(captured_step.regions) + indexers + with_choice
    short = capture("split", step, log, monkeypatch, max_context=NEAR)
    assert len(short._graphs) == len(short.regions) + with_choice
    assert list(short.model) == [True]


@pytest.mark.parametrize("mode", MODES)
def test_regions_hold_everything_but_attention_and_hand_offs(
    planned: PlannedModel, mode: Mode
) -> None:
    parts = planned.record(1).parts
    regions = regions_of(parts, mode)
    found = [(part_device(part), part) for _, run in regions for part in run]
    expected = [(part_device(part), part) for part in parts]
    assert found == (by_device(expected) if is_a_graph_each(planned, mode) else expected)
    outside = [part for name, run in regions if name is None for part in run]
    assert all(
        not isinstance(part, Part) or (mode == "split" and part.kind == "attention")
        for part in outside
    )
    inside = [part for name, run in regions if name is not None for part in run]
    assert {part.name for part in parts if part not in inside} == {part.name for part in outside}
    for name, run in regions:
        devices = {part.device for part in run if isinstance(part, Part)}
        assert len(devices) <= 1, name
        ranges = [(part.start, part.stop) for part in run if isinstance(part, Part)]
        assert all(first[1] == second[0] for first, second in pairwise(ranges)), name


@pytest.mark.parametrize("mode", MODES)
def test_regions_are_named_by_layers(
    planned: PlannedModel, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_a_graph_each(planned, mode):
        step, log, _ = fake_step(planned, planned.record(1), monkeypatch)
        *others, last = own_layers(planned)
        shared = ", head" if planned.shares else ""
        found = capture(mode, step, log, monkeypatch).regions
        assert sorted(found) == sorted(
            [*(f"{own}{shared}" for own in others), f"{last}, head, sample"]
        )
        return
    expected = []
    for segment in planned.model.segments:
        if mode == "full":
            expected.append(f"layers {segment.layers[0]} to {segment.layers[-1]}")
        else:
            expected += [f"layer {at} graph {half}" for at in segment.layers for half in "AB"]
            expected.append(f"layer {segment.layers[-1]} mix")
    behind = f"{expected.pop()}, head" if mode == "full" else "head"
    shares = len(planned.shares) if planned.state.channels is not None else 0
    if shares:
        expected += [behind, *["head"] * (shares - 1)]
    step, log, _ = fake_step(planned, planned.record(1), monkeypatch)
    last = ["head, sample"] if shares else [f"{behind}, sample"]
    assert capture(mode, step, log, monkeypatch).regions == [*expected, *last]
    longer, log, _ = fake_step(planned, planned.record(8), monkeypatch)
    last = ["head"] if shares else [behind]
    assert capture(mode, longer, log, monkeypatch).regions == [*expected, *last]


def own_layers(planned: PlannedModel) -> list[str]:
    """How those of a device are named, that of the head last."""
    layers: dict[Any, list[int]] = {}
    for layer, device in enumerate(planned.layer_devices):
        layers.setdefault(device, []).append(layer)
    head = layers.pop(planned.model.head_device)
    names = []
    for own in (*layers.values(), head):
        some = "layers" if own == list(range(own[0], own[-1] + 1)) else f"{len(own)} layers from"
        names.append(f"{some} {own[0]} to {own[-1]}")
    return names


def test_the_values_of_a_traced_step_come_from_their_devices(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the step completed: of the tokens at 3 and 4 one entry of a CSA layer, at 4 and 5
    none.
    """
    recorded = planned.record_traced(2)
    step, *_ = fake_step(planned, recorded, monkeypatch)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: tensor)
    for position, completed in ((3, 1), (4, 0)):
        shown = ShownValues()
        step.show(shown.add, position)
        seen = {name: rows.shape[0] for name, rows in shown.joined().items()}
        assert list(seen) == value_names(planned.config)
        for name, _, _, ratio in recorded.values:
            assert seen[name] == {1: 2, 4: completed}.get(ratio, 0), name
