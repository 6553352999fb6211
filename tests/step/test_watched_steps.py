"""A step that somebody watches: item by item, each inside its part on its device. One that nobody
watches: at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.step import step as module
from dsv4.step.parts import Part, Transfer
from tests.step.planned_model import demo, fake_step, items_of
from tests.step.test_running_parts import NEAR, without_channels


@pytest.mark.parametrize("dense", [False, True])
def test_a_watched_step_is_queued_item_by_item(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = without_channels(demo(2))
    recorded = planned.record(1)
    step, log, _ = fake_step(planned, recorded, monkeypatch)

    @contextmanager
    def noting(*what: Any) -> Iterator[None]:
        log.append(("in", *what))
        yield
        log.append(("out", *what))

    asked: list[bool] = []

    def noted(run: Any) -> Any:
        return lambda *arguments: asked.append(arguments[3]) or run(*arguments)

    for program in step.programs.values():
        monkeypatch.setattr(program, "run", noted(program.run))
    observer: Any = SimpleNamespace(part=noting, item=noting, hand_off=noting)
    monkeypatch.setattr(module, "on_device", lambda device: noting("device", device))
    step.run(1, NEAR if dense else None, observer)
    if not dense:
        step.sample(observer)
    expected: list[Any] = []

    def inside(what: tuple[Any, ...], entries: list[Any]) -> list[Any]:
        return [("in", *what), *entries, ("out", *what)]

    for part in recorded.parts if not dense else step.model_parts:
        if isinstance(part, Transfer):
            ends = (part.source, part.target)
            expected += inside(ends, [ends])
        elif isinstance(part, Part):
            items = [
                entry
                for index, name in recorded.launched(part, 1, dense)
                for entry in inside((name,), [(part.device, index)])
            ]
            own = inside((part.name, part.device, part.layer), items)
            expected += inside(("device", part.device), own)
            if part.drains is not None:
                expected.append(("drain", part.drains, part.device))
    assert log == expected
    assert set(asked) == {dense}


def test_a_step_that_nobody_watches_is_queued_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device alone: between two parts of it the host does nothing."""
    planned = demo()
    step, _, _ = fake_step(planned, planned.record(1), monkeypatch)
    ranges: list[tuple[int, int]] = []

    def run(_tokens: int, start: int, stop: int, _dense: bool) -> None:
        ranges.append((start, stop))

    monkeypatch.setattr(step.head_program, "run", run)
    step.run(1)
    assert ranges == [(0, len(items_of(step.model_parts)))]


def test_a_part_is_queued_with_its_device_as_the_current_one_in_the_memory_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = demo(2)
    log: list[Any] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        log.append(device)
        yield
        log.append("left")

    def program(recording: Any, memory: Any) -> Any:
        device = recording.target.device
        return SimpleNamespace(run=lambda *_: log.append((device, memory)))

    monkeypatch.setattr(module, "Program", program)
    monkeypatch.setattr("torch.cuda.device", current)
    first, second = planned.state.devices
    memory: Any = {first: "shared"}
    step = module.Step(planned.record(8), memory, {})
    for device, found in ((first, "shared"), (second, None)):
        log.clear()
        part = next(p for p in step.model_parts if isinstance(p, Part) and p.device == device)
        step.run_part(part, 8)
        assert log == [device, (device, found), "left"]
