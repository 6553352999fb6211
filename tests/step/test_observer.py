"""What an observer of a part sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.demo import CHECKPOINT
from dsv4.ops import TORCH
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.direct import DirectSteps
from dsv4.step.observer import open_part

CPU = torch.device("cpu")
NAMES = [field.name for field in fields(TORCH)]


class Noting:
    """An observer that notes what is entered and left."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def begin_step(self) -> None:
        """See ``Observer``."""

    @contextmanager
    def part(self, name: str, device: torch.device, layer: int | None) -> Iterator[None]:
        """See ``Observer``."""
        self.log.append((name, device, layer))
        yield
        self.log.append("left")

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """See ``Observer``."""
        self.log.append(name)
        yield
        self.log.append("done")

    @contextmanager
    def hand_off(self, source: torch.device, target: torch.device) -> Iterator[None]:
        """See ``Observer``."""
        yield


def test_every_op_of_a_part_is_seen_with_its_arguments_and_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the device of the part."""
    observer = Noting()

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        observer.log.append(f"on {device}")
        yield
        observer.log.append(f"off {device}")

    monkeypatch.setattr("dsv4.step.observer.on_device", on_device)

    def returning(name: str) -> Callable[..., Any]:
        def op(*arguments: int, **named: int) -> object:
            observer.log.append("run")
            return name, arguments, named

        return op

    ops = replace(TORCH, **{name: returning(name) for name in NAMES})
    with open_part(ops, observer, "experts", CPU, 3) as watched:
        for name in NAMES:
            assert getattr(watched, name)(1, two=2) == (name, (1,), {"two": 2})
    seen = [entry for name in NAMES for entry in (name, "run", "done")]
    part = ("layer 3 experts", CPU, 3)
    assert observer.log == ["on cpu", part, *seen, "left", "off cpu"]


def test_a_part_that_nobody_watches_has_the_ops_themselves() -> None:
    with open_part(TORCH, None, "experts", CPU, 3) as ops:
        assert ops is TORCH


def test_the_first_token_is_seen_in_the_parts_of_the_others() -> None:
    engine = Engine.load(CHECKPOINT, EngineConfig(device="cpu", max_context=32))
    steps = engine.steps
    assert isinstance(steps, DirectSteps)
    hidden_TE = steps.run([3, 1, 4])
    observer = Noting()
    steps.observer = observer
    sampler = Sampler(SamplingParams(temperature=0))
    first = steps.first_token(sampler, hidden_TE)
    assert parts_of(observer) == ["head", "logits", "sample"]
    next(steps.following(first, sampler, 1))
    assert parts_of(observer)[-3:] == ["head", "logits", "sample"]


def parts_of(observer: Noting) -> list[str]:
    """The names of what was entered."""
    return [entry[0] for entry in observer.log if isinstance(entry, tuple)]
