"""What a recorded step says of itself, of recordings that are written by hand."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.launch.items import Call, Item, Launch, ShapeOf
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.signature import Signature
from dsv4.model import Outputs
from dsv4.step.kernel_names import CALL
from dsv4.step.parts import Barrier, Part
from dsv4.step.recorded import RecordedStep, log_unusual_kernels
from tests.step.planned_model import GPUS, META, TARGETS

HEAD, OTHER = GPUS[:2]
KERNEL = Kernel("norm/rms_norm", "rms_norm")
SHAPE = Shape(KERNEL, 1, 32)


def launch(name: str = "rms_norm", shape_of: ShapeOf | None = None) -> Launch:
    return Launch(Signature(name, ()), SHAPE, {}, shape_of, SHAPE)


def step_of(*items: Item, tokens: int = 64, **others: Any) -> RecordedStep:
    """A step whose head has one part, of ``items``, and its other device none."""
    recordings = {device: Recording(TARGETS[device], tokens) for device in (HEAD, OTHER)}
    recordings[HEAD].items += items
    parts = (Part("head", HEAD, None, 0, len(items)), Barrier(HEAD))
    outputs = Outputs(torch.empty(1, 1, device=META), None)
    return RecordedStep(tokens, HEAD, parts, recordings, outputs, (), None, **others)


@pytest.mark.parametrize(
    ("found", "dense_until", "ends"),
    [
        ((60, 100), 60, [60, 8192]),
        ((100, 60), 60, [60, 8192]),
        ((0, 60), 60, [60, 8192]),
        ((0, 0), 0, [8192]),
        ((9000, 0), 9000, [8192]),
    ],
)
def test_a_step_is_dense_as_far_as_all_devices_that_choose_are(
    found: tuple[int, int], dense_until: int, ends: list[int]
) -> None:
    step = step_of()
    for recording, until in zip(step.recordings.values(), found, strict=True):
        recording.dense_until = until
    assert step.dense_until == dense_until
    assert step.ends(8192) == ends
    assert [step.is_dense(end) for end in (dense_until, dense_until + 1, None)] == [
        True,
        False,
        False,
    ]


def test_a_turn_is_of_the_uses_of_the_step_or_of_its_parts() -> None:
    class Channels:
        def __init__(self) -> None:
            self.uses: list[int] = []

        def turn(self, uses: int) -> AbstractContextManager[None]:
            self.uses.append(uses)
            return nullcontext()

    channels = Channels()
    step = step_of(channels=channels, channel_uses=3)
    for turn in (step.turn(), step.turn(uses=1), step.turn(uses=0)):
        with turn:
            pass
    assert channels.uses == [3, 1, 0]
    with step_of().turn():
        pass


def test_steps_of_ranks_are_counted_on_the_head() -> None:
    step = step_of()
    step.recordings[HEAD].steps_begun = 1
    step.recordings[OTHER].steps_begun = 2
    assert step.steps_begun == 1


def test_what_is_launched_goes_with_the_tokens() -> None:
    few = Shape(Kernel(KERNEL.source, KERNEL.function, (("FEW", 1),)), 1, 32)
    some = launch(shape_of=lambda tokens: None if tokens <= 40 else few if tokens < 60 else SHAPE)
    step = step_of(Call(print, []), some, launch("last"))
    (part, _) = step.parts
    assert isinstance(part, Part)
    assert step.launches(part) == [CALL, "rms_norm", "last"]
    assert [at for at, _ in step.launched(part, 40, False)] == [0, 2]
    assert [at for at, _ in step.launched(part, 41, False)] == [0, 1, 2]
    behind = Part("head", HEAD, None, 1, 2)
    assert [at for at, _ in step.launched(behind, 64, False)] == [1]
    assert step.launches(behind) == ["rms_norm"]
    # What shorter steps launch has to be compiled too.
    architecture = TARGETS[HEAD].architecture
    assert step_of(some).kernels() == {(KERNEL, architecture), (few.kernel, architecture)}


def test_a_part_differs_in_dense_steps_if_one_of_its_own_launches_does() -> None:
    other = replace(launch("chosen"), dense_shape=None)
    step = step_of(launch(), other, Call(print, []), launch())
    found = [
        (start, stop)
        for start in range(4)
        for stop in range(start + 1, 5)
        if step.differs_if_dense(Part("head", HEAD, None, start, stop))
    ]
    assert found == [(start, stop) for start in (0, 1) for stop in (2, 3, 4) if stop > start]


def test_kernels_for_unusual_geometry_are_said_once_and_those_of_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = step_of(launch("moe_any_geometry_of_none"), Call(print, []))
    steps = [
        usual,
        step_of(launch("moe_any_geometry"), launch("b_any_geometry")),
        step_of(launch("moe_any_geometry")),
    ]
    with caplog.at_level(logging.WARNING, logger="dsv4"):
        log_unusual_kernels([usual])
        assert caplog.messages == []
        log_unusual_kernels(steps)
    expected = "unusual geometry: b_any_geometry, moe_any_geometry instead of the fast kernels"
    assert caplog.messages == [expected]
    assert [step.unusual_kernels() for step in steps] == [
        [],
        ["b_any_geometry", "moe_any_geometry"],
        ["moe_any_geometry"],
    ]
