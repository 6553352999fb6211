"""Which layers the benchmark times, and what of a step belongs to one."""

from dataclasses import replace

import pytest

from dsv4.bench.layer_times import keep_everything, layer_items, layers_by_kind
from dsv4.checkpoint import geometry_config
from dsv4.config import ModelConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.workspace import lay_out
from dsv4.step.parts import Part
from tests.launch.simulated_memory import assert_buffers_survive
from tests.step.planned_model import GPUS, PlannedModel, geometry


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    return geometry("v4-flash", layers=6, gpus=2)


def kinds(layers: int, gpus: int = 1) -> dict[str, list[int]]:
    config = ModelConfig.from_dict(geometry_config("v4-flash", layers))
    return layers_by_kind(config, [GPUS[layer * gpus // layers] for layer in range(layers)])


def test_up_to_eight_layers_of_a_kind_on_the_first_device() -> None:
    found = kinds(43)
    assert found["SWA hash"] == [1]
    assert found["CSA hash"] == [2]
    assert found["HCA"] == [3, 5, 7, 9, 11, 13, 15, 17]
    assert found["CSA"] == [4, 6, 8, 10, 12, 14, 16, 18]
    assert len(found) == 4
    assert kinds(6, gpus=2) == {"SWA hash": [1], "CSA hash": [2]}


def test_the_first_layer_counts_where_it_is_alone() -> None:
    assert kinds(1) == {"SWA hash": [0]}
    assert kinds(2) == {"SWA hash": [1]}


def test_a_layer_goes_from_its_seam_to_its_experts(planned: PlannedModel) -> None:
    step = replace(planned, state=replace(planned.state, channels=None)).record(1)
    for layer, device in enumerate(planned.layer_devices):
        items = layer_items(step, layer)
        found = step.launches(Part("mix", device, layer, items.start, items.stop))
        opening = {0: ["embed"], 3: ["next_positions"]}.get(layer, [])
        assert found[: len(opening) + 2] == [*opening, "hc_mix", "hc_finish"]
        assert found[-3:] == ["hc_mix", "hc_finish", "moe_decode"]
    ranges = [layer_items(step, layer) for layer in range(3)]
    assert [items.start for items in ranges] == [0, ranges[0].stop, ranges[1].stop]


def test_a_layer_finds_its_input_whatever_other_layers_have_done(planned: PlannedModel) -> None:
    """With everything kept no buffer lies where another one does, so any order is right."""
    step = planned.record(1)
    recording = step.recordings[GPUS[0]]
    shared = lay_out(recording).nbytes
    keep_everything(recording)
    layout = lay_out(recording)
    assert_buffers_survive(recording, layout)
    assert layout.nbytes > shared
    sizes = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for item in recording.items
        for tensor in item.tensors
        if recording.owns(tensor)
    }
    places = sorted((layout.offsets[key], nbytes) for key, nbytes in sizes.items())
    ends = [offset + nbytes for offset, nbytes in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
