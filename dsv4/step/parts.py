"""What a recorded step is made of: its parts, and what goes between devices behind them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.model import PartKind, part_name


@dataclass(frozen=True)
class Part:
    """A named part of a step: the items ``start`` to ``stop`` of its device's recording.

    ``layer``: the layer that it belongs to. ``drains``: behind the part nothing reads what the
    hand-off from this device brought.
    """

    kind: PartKind
    device: torch.device
    layer: int | None
    start: int
    stop: int
    drains: torch.device | None = None

    @property
    def name(self) -> str:
        """Its kind, with its layer."""
        return part_name(self.kind, self.layer)


@dataclass(frozen=True)
class Transfer:
    """A hand-off: ``tensor`` of ``source`` goes to the arrival memory of ``target``."""

    source: torch.device
    target: torch.device
    tensor: Tensor

    @property
    def name(self) -> str:
        """With the indices of the devices."""
        return f"hand-off {self.source.index}→{self.target.index}"


@dataclass(frozen=True)
class Barrier:
    """All ranks have computed their partial results before any goes on."""

    source: torch.device

    @property
    def name(self) -> str:
        """With the index of the device."""
        return f"barrier of {self.source.index}"


AnyPart = Part | Transfer | Barrier
