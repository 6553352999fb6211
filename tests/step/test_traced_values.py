"""Traced steps as recordings: where values are kept, and that the launches stay what they were."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.layers.values import value_names
from dsv4.step.kernel_names import CALL
from dsv4.step.traced_values import TracedValues
from tests.ops.recorded import HOPPER
from tests.step.planned_model import compute_parts, geometry


def test_a_traced_step_keeps_every_value_where_it_is_computed() -> None:
    planned = geometry("v4-flash", layers=4, gpus=2)
    traced = planned.record_traced(2)
    assert [value.name for value in traced.values] == value_names(planned.config)
    for name, device, tensor, ratio in traced.values:
        _, layer, *_ = name.split(".") if name.startswith("layers.") else ("", "3")
        assert device == planned.layer_devices[int(layer)]
        assert tensor.shape[0] == -(-2 // ratio)
        assert any(tensor is kept for kept in traced.recordings[device].kept)


@pytest.mark.parametrize("tokens", [2, 512])
def test_a_traced_step_launches_what_the_step_does(tokens: int) -> None:
    """In the same order, whether its values are kept or shown."""
    planned = geometry("v4-flash", layers=4, gpus=2)
    plain = planned.record(tokens)
    kept = planned.record_traced(tokens)
    seen = TracedValues(lambda name: True, planned.state, lambda name, rows: None)
    shown = planned.record(tokens, seen)
    assert shown.values == ()
    parts = [
        [part for part in compute_parts(step) if set(step.launches(part)) != {CALL}]
        for step in (plain, kept, shown)
    ]
    for before, *traced in zip(*parts, strict=True):
        for step, part in zip((kept, shown), traced, strict=True):
            launches = [name for name in step.launches(part) if name != CALL]
            assert launches == plain.launches(before)


def test_values_that_are_shown_have_the_rows_of_the_tokens_of_the_run() -> None:
    state: Any = SimpleNamespace(position=8)
    shown: list[tuple[str, list[int]]] = []
    values = TracedValues(
        lambda name: True, state, lambda name, rows: shown.append((name, rows.tolist()))
    )
    recording = Recording(HOPPER, 8)
    values.open(recording)
    result = values.compute(torch.neg, (8,), torch.int64, torch.arange(8))
    values.value("tokens", result)
    values.value("entries", result, ratio=4)
    memory = torch.zeros(8, dtype=torch.int64)
    store, *copies = [item.function for item in recording.items if isinstance(item, Call)]
    store(3, memory, torch.arange(8))
    for copy in copies:
        copy(3, memory)
    assert memory.tolist() == [0, -1, -2, 0, 0, 0, 0, 0]
    assert shown == [("tokens", [0, -1, -2]), ("entries", [0])]


def test_a_value_that_nobody_wants_costs_nothing() -> None:
    planned = geometry("v4-flash", layers=4, gpus=2)
    plain = planned.record(512)
    traced = planned.record_traced(512, lambda name: name == "layers.2.streams")
    assert [value.name for value in traced.values] == ["layers.2.streams"]
    for before, after in zip(compute_parts(plain), compute_parts(traced), strict=True):
        assert traced.launches(after) == plain.launches(before)
