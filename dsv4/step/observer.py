"""Watching eager steps: an observer is entered around every part and around every op or kernel
inside it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Protocol

import torch

from dsv4.model import PartKind, part_name
from dsv4.ops import Ops
from dsv4.step.current_device import on_device


class Observer(Protocol):
    """The interface of ``DirectSteps.observer`` and ``RecordedSteps.observer``. Captured graphs are
    not watched.
    """

    def begin_step(self) -> None:
        """The parts of a step follow."""
        ...

    def part(
        self, name: str, device: torch.device, layer: int | None
    ) -> AbstractContextManager[object]:
        """Around the items of a part (``dsv4.model.Parts``)."""
        ...

    def item(self, name: str) -> AbstractContextManager[object]:
        """Around an op of the open part or, in a recorded step, around the launch of a kernel."""
        ...

    def hand_off(
        self, source: torch.device, target: torch.device
    ) -> AbstractContextManager[object]:
        """Around a copy of the streams to another device, between two parts."""
        ...


@contextmanager
def open_part(
    ops: Ops,
    observer: Observer | None,
    kind: PartKind,
    device: torch.device,
    layer: int | None = None,
) -> Iterator[Ops]:
    """The ops of a part, with ``device`` as the current one; an observer may watch them."""
    with on_device(device):
        if observer is None:
            yield ops
            return
        with observer.part(part_name(kind, layer), device, layer):
            yield _watched_ops(ops, observer)


def _watched_ops(ops: Ops, observer: Observer) -> Ops:
    names = [field.name for field in fields(ops)]
    return replace(ops, **{name: _watched(name, getattr(ops, name), observer) for name in names})


def _watched(name: str, op: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @wraps(op)
    def watched(*arguments: Any, **named: Any) -> Any:
        with observer.item(name):
            return op(*arguments, **named)

    return watched
