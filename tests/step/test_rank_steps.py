"""What a rank records for its engine and the memory that it gives, on stand-ins for what is on a
device.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.sampling import SamplerState
from dsv4.step import rank_steps as module
from dsv4.step.rank_steps import RankSteps
from dsv4.step.recorder import RING_TOKENS
from dsv4.step.traced_values import TracedValues
from tests.step.planned_model import GPUS, META, TARGETS, PlannedModel, geometry


class FakeFeed:
    """Stands for ``TokenFeed``."""

    def __init__(self, devices: Any, head: Any, tokens: int, memory: Any, channels: Any) -> None:
        self.asked = (tuple(devices), head, tokens, memory, channels)
        self.inputs = {
            device: torch.empty(tokens, dtype=torch.int64, device=META) for device in devices
        }
        ends = (GPUS[1], GPUS[0])
        self.given = {ends: torch.empty(1, dtype=torch.int64, device=META)} if tokens == 1 else {}


class FakeAlong:
    """Says what it is asked, and records nothing."""

    def __init__(self) -> None:
        self.inputs = {device: torch.empty(8, dtype=torch.int64, device=META) for device in GPUS}
        self.log: list[Any] = []

    def listen(self, behind: Any) -> Any:
        return behind

    def record(self, recorder: Any, values: Any) -> None:
        self.log.append("behind the model")

    def record_choice(self, recorder: Any, logits_TV: Any, token: Any, sampler: Any) -> None:
        self.log.append(("behind the choice", token is not None, sampler))

    def own_steps(self, targets: Any, sampler: Any) -> list[Any]:
        return [targets, sampler]

    def steps_apart(self, target: Any) -> list[Any]:
        return [target]


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    return geometry("v4-flash", layers=3, gpus=2)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is (device, bytes), a step what it was made of."""
    allocate = SamplerState.allocate
    ring = SimpleNamespace(tokens=torch.zeros(RING_TOKENS, dtype=torch.int64, device=META))
    monkeypatch.setattr(module.SamplerState, "allocate", lambda device: allocate(META))
    monkeypatch.setattr(module, "TokenRing", lambda device: ring)
    monkeypatch.setattr(module, "HandOff", lambda source, arrived: (source, arrived))
    monkeypatch.setattr(module.Target, "of", lambda device: TARGETS[device])
    monkeypatch.setattr(module, "Memory", lambda device, nbytes: (device, nbytes))
    monkeypatch.setattr(module, "TokenFeed", FakeFeed)
    monkeypatch.setattr(module, "Step", lambda *arguments: arguments)


def rank_of(planned: PlannedModel, along: Any = None) -> Any:
    return RankSteps(planned.model, planned.state, planned.table, along)


@pytest.mark.parametrize(
    ("tokens", "logits", "has_logits", "has_token"),
    [
        (1, True, True, True),
        (1, False, False, False),
        (8, True, True, False),
        (9, True, False, False),
    ],
)
def test_steps_of_decoding_have_logits_and_that_of_one_token_a_choice(
    planned: PlannedModel, tokens: int, logits: bool, has_logits: bool, has_token: bool
) -> None:
    recorded, feed = rank_of(planned).record(tokens, logits=logits)
    assert (recorded.outputs.logits_TV is not None) == has_logits
    assert (recorded.token is not None) == has_token
    devices = planned.state.devices
    channels = planned.state.channels
    assert channels is not None
    first = recorded.launches(recorded.parts[0])[0]
    assert first == ("take_tokens" if tokens == 1 else "embed")
    assert feed.asked == (devices, planned.model.head_device, tokens, None, channels)


def test_what_runs_along_shares_the_inputs_of_decoding_and_may_be_left_out(
    planned: PlannedModel,
) -> None:
    along = FakeAlong()
    rank = rank_of(planned, along)
    inputs = []
    for tokens, alone in ((1, False), (8, False), (9, False), (1, True)):
        _, feed = rank.record(tokens, alone=alone)
        inputs.append(feed.asked[3])
    assert [one is along.inputs for one in inputs] == [True, True, False, False]
    assert inputs[2:] == [None, None]
    choices = [("behind the choice", chosen, rank.sampler) for chosen in (True, False)]
    model = "behind the model"
    assert along.log == [model, choices[0], model, choices[1], model]


def test_a_traced_step_keeps_what_is_wanted(planned: PlannedModel) -> None:
    traced = TracedValues(lambda name: name == "hidden", planned.state)
    recorded, _ = rank_of(planned).record(8, traced)
    assert [value.name for value in recorded.values] == ["hidden"]


def test_further_steps_are_those_of_what_runs_along(planned: PlannedModel) -> None:
    assert rank_of(planned).own_steps() == ([], [])
    rank = rank_of(planned, FakeAlong())
    own, apart = rank.own_steps()
    assert own == [rank.targets, rank.sampler]
    assert apart == [TARGETS[planned.model.head_device]]


def test_steps_share_the_memory_of_the_largest_unless_they_are_apart(
    planned: PlannedModel,
) -> None:
    rank = rank_of(planned)
    first, second = planned.state.devices
    sizes = [{first: 10, second: 30}, {first: 20}]
    steps = [SimpleNamespace(workspace_bytes=lambda size=size: size) for size in sizes]
    rank.allocate(steps)
    assert rank.memory == {first: (first, 20), second: (second, 30)}
    recorded, feed = object(), object()
    assert rank.ready(recorded, feed) == (recorded, rank.memory, rank.hand_offs, feed)
    assert rank.ready(recorded, feed, apart=True) == (recorded, {}, rank.hand_offs, feed)
    assert rank.hand_offs.keys() == planned.state.arrivals.keys()
    for (source, target), hand_off in rank.hand_offs.items():
        assert hand_off == (source, planned.state.arrivals[source, target])


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_are_computed_in_memory_of_their_own(planned: PlannedModel, rows: int) -> None:
    """So that the hidden states of a prompt stay; only one row is followed by a token."""
    rank = rank_of(planned)
    # There its input has no memory.
    rank.head = META
    rank.targets[META] = rank.targets[planned.model.head_device]
    rank.memory = {META: "of other steps"}
    (recorded, memory, hand_offs), rows_TE = rank.logits_step(rows)
    assert (memory, hand_offs) == ({}, {})
    assert (rows_TE.shape, rows_TE.dtype) == ((rows, planned.config.hidden_size), torch.bfloat16)
    assert recorded.outputs.hidden_TE is rows_TE
    assert recorded.outputs.logits_TV.shape == (rows, planned.config.vocab_size)
    names = [part.name for part in recorded.parts]
    assert names == (["head", "sample"] if rows == 1 else ["head"])
    assert (recorded.token is not None) == (rows == 1)
    kept = recorded.recordings[planned.model.head_device].kept
    outputs = (recorded.outputs.logits_TV, *([recorded.token] if rows == 1 else []))
    assert all(any(output is one for one in kept) for output in outputs)
