"""One layer recorded for the CUDA ops without a GPU, as validation runs it."""

import pytest
import torch

from dsv4.checkpoint import Geometry
from dsv4.model import Segment
from dsv4.step.parts import Part
from dsv4.step.recorder import StepRecorder
from dsv4.step.traced_values import TracedValues
from dsv4.validate.one_layer import record_layer
from tests.step.planned_model import GPUS, META, TARGETS, geometry

# One layer of every kind: hashed and scored routers, SWA, CSA and HCA.
LAYERS: list[tuple[Geometry, int]] = [
    *[("v4-flash", layer) for layer in (1, 2, 3, 4)],
    *[("v4-pro", layer) for layer in (1, 2, 3, 4)],
]


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_alone_is_recorded_as_in_the_model(name: Geometry, layer: int, tokens: int) -> None:
    planned = geometry(name, layers=5)
    config = planned.config
    device = GPUS[0]
    tokens_T = torch.empty(tokens, dtype=torch.int64, device=META)
    shape = (tokens, config.hc_mult, config.hidden_size)
    entering_TME = torch.empty(shape, dtype=torch.bfloat16, device=META)
    segment = Segment(device, (layer,), (planned.model.blocks[layer],))
    values = TracedValues(lambda _: False, planned.state)
    recorder = StepRecorder(
        planned.table, {device: TARGETS[device]}, planned.state, {device: tokens_T}, values
    )
    alone = record_layer(segment, recorder, planned.state, entering_TME)
    whole = planned.record(tokens)
    found = {part.name: alone.launches(part) for part in alone.parts if isinstance(part, Part)}
    expected = {part.name: whole.launches(part) for part in whole.parts if isinstance(part, Part)}
    attention = f"layer {layer} attention"
    experts = f"layer {layer} experts"
    assert found[attention] == expected[attention]
    assert found[experts] == expected[experts]
    assert list(found) == [
        f"layer {layer} projections",
        attention,
        experts,
        f"layer {layer} mix",
    ]
