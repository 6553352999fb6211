"""Steps of several devices that share the rows of the head."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.parallel.meeting_bytes import head_memory_bytes
from dsv4.step.parts import AnyPart, Part, Wait
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder, record_step
from tests.step.planned_model import ENGINE, META, PlannedModel, geometry

TOKENS = (1, 2, 5, 8)


@pytest.fixture(scope="module", params=["2 GPUs", "8 GPUs", "round robin"])
def planned(request: pytest.FixtureRequest) -> PlannedModel:
    if request.param == "round robin":
        return geometry("v4-flash", layers=5, gpus=2, round_robin=True)
    return geometry("v4-flash", layers=8, gpus=int(request.param[0]))


def places(step: RecordedStep, tensor: Tensor) -> list[int]:
    """The parts in which something reads or writes this memory."""
    key = storage_key(tensor)

    def touches(part: AnyPart) -> bool:
        if not isinstance(part, Part):
            return False
        recording = step.recordings[part.device]
        items = recording.items[part.start : part.stop]
        keys = {storage_key(tensor) for item in items for tensor in item.tensors}
        placed = {at for at, memory in recording.placed.items() if storage_key(memory) == key}
        return bool(keys & {key, *placed})

    return [at for at, part in enumerate(step.parts) if touches(part)]


def behind(step: RecordedStep, at: int, until: int | None = None) -> set[torch.device]:
    """The devices that do what follows when this part is done, by their own order and by waits."""
    found = {device_of(step.parts[at])}
    for part in step.parts[at:until]:
        if isinstance(part, Wait) and part.source in found:
            found.add(part.target)
    return found


def device_of(part: AnyPart) -> torch.device:
    return part.device if isinstance(part, Part) else part.source


@pytest.mark.parametrize("tokens", TOKENS)
def test_who_reads_waits_for_who_wrote(planned: PlannedModel, tokens: int) -> None:
    step = planned.record(tokens)
    memory = planned.state.head
    assert memory is not None
    hidden, *fetched = places(step, memory.hidden_TE)
    assert step.parts[hidden].name == "head"
    assert {device_of(step.parts[at]) for at in fetched} == set(planned.layer_devices)
    assert all(device_of(step.parts[at]) in behind(step, hidden, at) for at in fetched)
    touched = places(step, memory.logits_TV)
    products = [at for at in touched if step.parts[at].name == "head"]
    assert len(products) == len(planned.shares)
    # By then what reads the logits, and what writes hidden states anew, waits for all.
    until = touched[-1] if step.parts[touched[-1]].name == "sample" else None
    assert all(planned.model.head_device in behind(step, at, until) for at in products)


def test_each_device_stores_its_own_columns(planned: PlannedModel) -> None:
    step = planned.record(3)
    memory = planned.state.head
    assert memory is not None
    for share in planned.shares:
        (product,) = (
            item
            for item in step.recordings[share.device].items
            if isinstance(item, Launch) and item.arguments.get("data0") is share.rows.data
        )
        y = product.arguments["y"]
        assert isinstance(y, Tensor)
        assert storage_key(y) == storage_key(memory.logits_TV)
        assert (y.storage_offset(), y.stride(0)) == (share.first, planned.config.vocab_size)


def test_its_memory_is_what_is_planned(planned: PlannedModel) -> None:
    memory = planned.state.head
    assert memory is not None
    assert sum(tensor.nbytes for tensor in memory) == head_memory_bytes(planned.config, ENGINE)


def test_steps_without_logits_share_nothing(planned: PlannedModel) -> None:
    memory = planned.state.head
    assert memory is not None
    step = planned.record(512)
    assert not places(step, memory.hidden_TE)
    assert not any(isinstance(part, Wait) for part in step.parts)


@pytest.mark.parametrize("tokens", TOKENS)
def test_traced_steps_show_the_shared_logits(planned: PlannedModel, tokens: int) -> None:
    step = planned.record_traced(tokens, lambda name: name in ("hidden", "logits"))
    shown = {value.name: value for value in step.values}
    assert {value.device for value in shown.values()} == {planned.model.head_device}
    assert list(shown["logits"].tensor.shape) == [tokens, planned.config.vocab_size]


def test_a_recorder_lives_no_longer_than_it_is_used(planned: PlannedModel) -> None:
    """It knows weights and caches: in a cycle of references it would keep their memory."""
    inputs = {device: torch.empty(1, dtype=torch.int64, device=META) for device in planned.targets}
    recorder = StepRecorder(planned.table, planned.targets, planned.state, inputs)
    gone = weakref.ref(recorder)
    gc.disable()
    try:
        step = record_step(planned.model, planned.state, recorder, True)
        assert any(isinstance(part, Wait) for part in step.parts)
        del recorder
        assert gone() is None
    finally:
        gc.enable()
