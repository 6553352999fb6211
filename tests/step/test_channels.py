"""Decode steps of several devices, which send each other rows by channels: streams, hidden states,
the logits of a head that they share, and the next token.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.channels import Ends
from dsv4.checkpoint.layouts import format_in
from dsv4.engine_config import EngineConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import channel_bytes
from dsv4.step.captured import Mode, part_device, regions_of
from dsv4.step.parts import AnyPart, Part, Transfer
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder, record_step
from dsv4.weights.parameters import parameters
from tests.ops.cases import tiny_config
from tests.step.memory_order import FakeEvent, FakeStream, SharedMemory
from tests.step.planned_model import ENGINE, GPUS, META, PlannedModel, demo, fake_step, geometry

TOKENS = (1, 2, 5, 8)
PLANNED = {
    "2 GPUs": lambda: geometry("v4-flash", layers=8, gpus=2),
    "8 GPUs": lambda: geometry("v4-pro", layers=9, gpus=8),
    "round robin": lambda: geometry("v4-flash", layers=5, gpus=2, round_robin=True),
    "round robin of 3": lambda: geometry("v4-flash", layers=7, gpus=3, round_robin=True),
    "a head on one GPU": lambda: demo(2),
}


@pytest.fixture(scope="module", params=PLANNED)
def planned(request: pytest.FixtureRequest) -> PlannedModel:
    return PLANNED[request.param]()


def ends_of(planned: PlannedModel) -> dict[int, Ends]:
    """The channels, by the storage of their words."""
    assert planned.state.channels is not None
    found = planned.state.channels.all
    return {storage_key(channel.words_W): (channel.source, channel.target) for channel in found}


def launches(step: RecordedStep, parts: list[AnyPart]) -> Iterator[tuple[torch.device, Launch]]:
    """In the order in which they are queued."""
    for part in parts:
        assert isinstance(part, Part)
        for item in step.recordings[part.device].items[part.start : part.stop]:
            if isinstance(item, Launch):
                yield part.device, item


def values_of(item: Launch) -> int:
    """Of 32 bits, that a launch sends or receives."""
    count = item.shape.numbers.get("count", item.arguments.get("count"))
    assert isinstance(count, int)
    return 2 * count if item.signature.kernel == "take_tokens" else count


def uses(
    planned: PlannedModel, step: RecordedStep, parts: list[AnyPart]
) -> tuple[dict[Ends, list[int]], dict[Ends, int]]:
    """What is on its way by channel when all of ``parts`` are queued, and how often each was used.

    What is received was sent before, and nothing is sent before that.
    """
    channels = ends_of(planned)
    on_its_way: dict[Ends, list[int]] = defaultdict(list)
    counts: dict[Ends, int] = defaultdict(int)
    for device, item in launches(step, parts):
        if "uses" not in item.arguments:
            continue
        words = item.arguments["words"]
        assert isinstance(words, Tensor)
        source, target = ends = channels[storage_key(words)]
        assert values_of(item) <= words.shape[0]
        if item.signature.kernel == "send_rows":
            assert (device, on_its_way[ends]) == (source, [])
            on_its_way[ends].append(values_of(item))
            counts[ends] += 1
        elif item.signature.kernel == "receive_rows":
            assert (device, on_its_way[ends]) == (target, [values_of(item)])
            on_its_way[ends].clear()
    return {ends: found for ends, found in on_its_way.items() if found}, counts


class Words:
    """The words of all channels. Who receives has waited for all that was done before the sender
    sent.
    """

    def __init__(self, planned: PlannedModel) -> None:
        self.reads = 0
        self.channels = ends_of(planned)
        self.memory = SharedMemory(1 + max(device.index for device in planned.state.devices))
        self._sent: dict[Ends, list[int]] = {}

    def follow(self, log: Iterable[tuple[torch.device, Any]], is_given: bool) -> None:
        """What was queued, with what ``FakeStream`` writes, touches words in an order that is
        certain. Counts what reads; ``is_given``: the host gives the tokens.
        """
        for device, what in log:
            if not self.memory.runs(device.index, what) or "uses" not in what.arguments:
                continue
            kernel = what.signature.kernel
            if kernel == "take_tokens" and is_given:
                continue
            ends = self.channels[storage_key(what.arguments["words"])]
            sends = kernel == "send_rows"
            if sends:
                self._sent[ends] = list(self.memory.clocks[device.index])
            else:
                self.memory.wait_for(device.index, self._sent[ends])
            self.memory.touch(device.index, ends, writes=sends)
            self.reads += not sends


def test_words_are_read_before_they_are_written_anew(planned: PlannedModel) -> None:
    """Whatever steps follow each other: tokens that the host gives, or that the step before sends,
    also those of which nobody reads the last one.
    """
    words = Words(planned)
    head = planned.model.head_device.index
    steps = {tokens: planned.record(tokens) for tokens in TOKENS}
    for tokens, is_given in [(1, True), *[(1, False)] * 3, (8, True), (5, True), *[(1, True)] * 3]:
        if is_given:
            # ``TokenFeed.put``
            for device in planned.state.devices:
                words.memory.wait_for(device.index, words.memory.clocks[head])
        words.follow(launches(steps[tokens], list(steps[tokens].parts)), is_given)
    assert words.reads > len(words.channels)


@pytest.mark.parametrize("gpus", [2, 3])
def test_the_words_of_an_interrupted_step_are_read_before_the_next_one(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends behind any part, and the position is set again."""
    planned = geometry("v4-flash", layers=6, gpus=gpus)
    step = planned.record(1)
    parts = list(step.parts)
    log: list[Any] = []
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: FakeStream(device, log))
    for stop in range(1, len(parts)):
        log[:] = launches(step, parts[:stop])
        planned.state.set_position(0)
        log += launches(step, parts)
        Words(planned).follow(log, is_given=True)


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_received_was_sent_in_front_of_it(planned: PlannedModel, tokens: int) -> None:
    """So whatever waits is queued behind all that it waits for."""
    step = planned.record(tokens)
    left, counts = uses(planned, step, list(step.parts))
    head = planned.model.head_device
    others = [device for device in planned.state.devices if device != head]
    # The token waits for the next step.
    assert left == ({(head, other): [2] for other in others} if tokens == 1 else {})
    assert step.channels is planned.state.channels
    assert step.channel_uses == max(counts.values())


@pytest.mark.parametrize("streams", [1, 3, 4])
def test_rows_of_an_odd_width_have_room(streams: int) -> None:
    """Of one token or three they are no whole values: streams, and hidden states for a head that
    devices share.
    """
    widths = {"num_attention_heads": 1, "o_groups": 1, "qk_rope_head_dim": 8}
    config = tiny_config(hidden_size=65, vocab_size=131_072, hc_mult=streams, **widths)
    stored = [(p, format_in("bf16", p)) for p in parameters(config).values()]
    devices = Placement.pipeline([1] * config.num_hidden_layers, GPUS[:2]).layer_devices
    odd = PlannedModel.of(config, stored, devices, EngineConfig(max_context=64))
    assert len(odd.shares) == 2
    for tokens in (*TOKENS, 7):
        step = odd.record(tokens)
        uses(odd, step, list(step.parts))


def test_a_choice_counts_its_own_uses_alone(
    planned: PlannedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host never counts less than the devices."""
    recorded = planned.record(1)
    step, *_ = fake_step(planned, recorded, monkeypatch)
    channels = planned.state.channels
    assert channels is not None
    begun = channels._begun
    step.run(1)
    assert channels._begun == begun + recorded.channel_uses
    step.sample()
    _, counts = uses(planned, recorded, step.sample_parts)
    assert channels._begun == begun + recorded.channel_uses + max(counts.values())


@pytest.mark.parametrize("mode", ["split", "full"])
def test_a_device_does_its_parts_in_their_order_whatever_one_graph_holds(
    planned: PlannedModel, mode: Mode
) -> None:
    step = planned.record(1)
    regions = regions_of(step.parts, mode)
    for device in planned.state.devices:
        found = [part for _, run in regions for part in run if part_device(part) == device]
        assert found == [part for part in step.parts if part_device(part) == device]
    if mode == "full":
        assert len(regions) == len(planned.state.devices)


def test_a_token_comes_before_whoever_reads_it(planned: PlannedModel) -> None:
    step = planned.record(1)
    for device, recording in step.recordings.items():
        names = [item.signature.kernel for item in recording.items if isinstance(item, Launch)]
        assert names.count("take_tokens") == (device != planned.model.head_device)
        assert "take_tokens" not in names[1:]
    *_, sent, stored = step.recordings[planned.model.head_device].items
    assert isinstance(sent, Launch)
    assert isinstance(stored, Launch)
    assert (sent.signature.kernel, stored.signature.kernel) == ("send_rows", "store_token")


def test_the_head_gets_the_columns_of_every_share(planned: PlannedModel) -> None:
    tokens = 3
    step = planned.record(tokens)
    vocabulary = planned.config.vocab_size
    found: dict[int, int] = {}
    for _, item in launches(step, list(step.parts)):
        y = item.arguments.get("y", item.arguments.get("rows"))
        if not isinstance(y, Tensor) or y.dtype != torch.float32 or y.dim() != 2:
            continue
        if y.stride(0) == vocabulary:
            width = item.arguments.get("width", y.shape[1])
            assert isinstance(width, int)
            found[int(y.storage_offset())] = width
            assert item.arguments.get("pitch", vocabulary) == vocabulary
            # They come soon: what follows starts meanwhile.
            assert dict(item.shape.kernel.defines).get("EARLY", 1) == 1
    firsts = [share.first for share in planned.shares] or [0]
    assert sorted(found) == firsts
    for share in planned.shares[:-1]:
        assert found[share.first] == share.rows.shape[0]


def test_their_memory_is_what_is_planned(planned: PlannedModel) -> None:
    placement = Placement.of_layers(planned.layer_devices)
    assert planned.state.channels is not None
    allocated = dict.fromkeys(placement.devices, 0)
    for channel in planned.state.channels.all:
        allocated[channel.source] += channel.sent_1.nbytes
        allocated[channel.target] += channel.words_W.nbytes + channel.received_1.nbytes
    assert channel_bytes(planned.config, ENGINE, placement) == allocated


def test_longer_steps_use_none(planned: PlannedModel) -> None:
    step = planned.record(512)
    assert step.channels is None
    assert not any("uses" in item.arguments for _, item in launches(step, compute(step)))
    assert any(isinstance(part, Transfer) for part in step.parts)


def compute(step: RecordedStep) -> list[AnyPart]:
    return [part for part in step.parts if isinstance(part, Part)]


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
        step = record_step(planned.model, planned.state, recorder)
        assert step.channel_uses
        del recorder
        assert gone() is None
    finally:
        gc.enable()
