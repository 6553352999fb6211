"""µs of one block by layer kind: the items of single layers of a recorded decode step, replayed in
a graph.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dsv4.bench.device import capture, replay_microseconds
from dsv4.config import KIND_OF_RATIO, ModelConfig
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.step.current_device import on_device
from dsv4.step.parts import Part
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder, record_step
from dsv4.step.step import Step
from dsv4.step.steps import RecordedSteps
from dsv4.step.token_feed import TokenFeed

_MOST_LAYERS = 8
_REPLAYS = 20


class LayerTimes:
    """The layers of the first device, by kind, in a step whose buffers share no memory.

    So each layer finds its input, what the layer before it left in the last run of the whole step,
    and can be run again and again without the others.
    """

    def __init__(self, config: ModelConfig, steps: RecordedSteps) -> None:
        devices = {
            layer: segment.device for segment in steps.model.segments for layer in segment.layers
        }
        layer_devices = [devices[layer] for layer in range(config.num_hidden_layers)]
        self._device = layer_devices[0]
        self._layers = layers_by_kind(config, layer_devices)
        self._state = steps.state
        self._step = _step_in_parts(steps, self._device)

    @torch.inference_mode()
    def measure(self, position: int) -> dict[str, float]:
        """Median µs of one block by kind, at ``position``: up to eight blocks of a kind in one
        graph.
        """
        measured = {}
        program = self._step.programs[self._device]
        for kind, layers in self._layers.items():
            self._run_whole(position)
            dense = self._step.recorded.is_dense(position + 1)
            ranges = [layer_items(self._step.recorded, layer) for layer in layers]
            calls = [partial(program.run, 1, part.start, part.stop, dense) for part in ranges]
            with on_device(self._device):
                times = replay_microseconds(capture(calls), _REPLAYS)
            measured[kind] = round(statistics.median(times) / len(calls), 2)
        self._state.set_position(position)
        return measured

    def _run_whole(self, position: int) -> None:
        assert self._step.feed is not None
        self._state.set_position(position)
        self._step.feed.put([0])
        self._step.run(1, position + 1)


def layers_by_kind(
    config: ModelConfig, layer_devices: Sequence[torch.device]
) -> dict[str, list[int]]:
    """Up to eight layers of every kind on the first device, those with hash routing apart.

    The first layer also embeds and advances the position. It counts only as the only one of its
    kind.
    """
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for layer, (ratio, hashed) in enumerate(
        zip(config.compress_ratios, config.hash_layers, strict=True)
    ):
        if layer_devices[layer] == layer_devices[0]:
            kinds[KIND_OF_RATIO[ratio] + (" hash" if hashed else "")].append(layer)
    chosen = {}
    for kind, layers in kinds.items():
        inner = [layer for layer in layers if layer > 0]
        chosen[kind] = (inner or layers)[:_MOST_LAYERS]
    return chosen


def layer_items(step: RecordedStep, layer: int) -> range:
    """The items of a layer in its device's recording, from the seam before attention to the
    experts.
    """
    parts = [part for part in step.parts if isinstance(part, Part) and part.layer == layer]
    block = [part for part in parts if part.kind != "mix"]
    return range(block[0].start, block[-1].stop)


def keep_everything(recording: Recording) -> None:
    """Keeps every buffer to the end, so that no two of them share memory."""
    for item in list(recording.items):
        for tensor in item.tensors:
            if recording.owns(tensor):
                recording.keep(tensor)


def _step_in_parts(steps: RecordedSteps, device: torch.device) -> Step:
    """A decode step of one token with memory of its own, in which ``device`` keeps every buffer. No
    layer of it waits for another device.
    """
    state = replace(steps.state, channels=None)
    feed = TokenFeed(state.devices, steps.head, 1)
    targets = {device: Target.of(device) for device in state.devices}
    recorder = StepRecorder(steps.table, targets, state, feed.inputs)
    recorded = record_step(steps.model, state, recorder)
    keep_everything(recorded.recordings[device])
    return Step(recorded, {}, steps.ranks[0].hand_offs, feed)
