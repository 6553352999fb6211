"""The demo checkpoint on a GPU, for tests of decoding: engines, prompts, comparisons bit by bit."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.demo import CHECKPOINT
from dsv4.demo.training.recall import recall_128
from dsv4.demo.training.tasks import arithmetic, capitals, stories
from dsv4.step.steps import RecordedSteps
from dsv4.validate.decode_checks import cache_tensors, same_bits
from encoding.tokenizer import Tokenizer

TOKENIZER = Tokenizer(CHECKPOINT)
PROMPTS = {
    task.__name__: TOKENIZER.encode(task(random.Random(1), True).prompt)
    for task in (capitals, stories, arithmetic, recall_128)
}
GREEDY = SamplingParams(temperature=0.0)
MODES: tuple[Mode, ...] = ("split", "full")
LAYERS = 6


def load(**settings: Any) -> Engine:
    """The demo on CUDA with a context of 2,048 tokens, unless ``settings`` say otherwise."""
    return Engine.load(
        CHECKPOINT, EngineConfig(**{"device": "cuda", "max_context": 2048, **settings})
    )


def steps_of(engine: Engine) -> RecordedSteps:
    """The recorded steps of an engine with the CUDA ops."""
    assert isinstance(engine.steps, RecordedSteps)
    return engine.steps


def decoder_of(engine: Engine, mode: Mode, lengths: Sequence[int] = (1,)) -> CUDAGraphDecoder:
    """A decoder for the engine's state, beside whatever decoder the engine has."""
    return CUDAGraphDecoder(steps_of(engine), mode, engine.max_context, lengths)


def bits(tensor: Tensor) -> Tensor:
    """float32 as integers, so that NaN equals itself and 0 is not −0."""
    return tensor.view(torch.int32)


def start(engine: Engine, prompt: Sequence[int]) -> None:
    """A fresh sequence in caches of zeros."""
    engine.reset()
    for _, cache in cache_tensors(engine.state):
        cache.zero_()
    engine.prefill(prompt)


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copies of every cache and of every device's position, by name."""
    found = {name: cache.clone() for name, cache in cache_tensors(engine.state)}
    for device in engine.state.devices:
        position_1, rejected_1 = engine.state.place(device)
        found[f"position on {device}"] = position_1.clone()
        found[f"rejected on {device}"] = rejected_1.clone()
    return found


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names what differs between two snapshots."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


def assert_same_logits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Names the steps whose logits differ in a bit, wherever they are."""
    pairs = [(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True)]
    assert [step for step, (a, b) in enumerate(pairs) if not same_bits(a, b)] == []
