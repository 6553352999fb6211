"""Placement: the device of every layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from dsv4.engine_config import EngineConfig
from dsv4.weights.parameters import layer_of


@dataclass(frozen=True)
class Placement:
    """``layer_devices[l]`` owns layer l; the embedding is with the first layer, everything else
    with the last.
    """

    layer_devices: tuple[torch.device, ...]

    @classmethod
    def of(
        cls, engine: EngineConfig, devices: Sequence[torch.device], layer_bytes: Sequence[int]
    ) -> "Placement":
        """The placement that ``engine`` asks for on ``devices``; ``layer_bytes`` as from
        ``bytes_by_layer``.
        """
        if engine.parallel == "round-robin":
            return cls.round_robin(len(layer_bytes), devices)
        return cls.pipeline(layer_bytes, devices)

    @classmethod
    def pipeline(cls, layer_bytes: Sequence[int], devices: Sequence[torch.device]) -> "Placement":
        """Contiguous segments balanced by bytes, so that a token crosses between devices once per
        boundary.

        No device is without a layer while there are layers.
        """
        ends = _balanced_ends(layer_bytes, min(len(devices), len(layer_bytes)))
        counts = [end - start for start, end in pairwise((0, *ends))]
        return cls(
            tuple(
                device for device, count in zip(devices, counts, strict=False) for _ in range(count)
            )
        )

    @classmethod
    def round_robin(cls, layers: int, devices: Sequence[torch.device]) -> "Placement":
        """Layer l on device l mod N: a token crosses between devices at every layer."""
        return cls(tuple(devices[layer % len(devices)] for layer in range(layers)))

    def device_of(self, name: str) -> torch.device:
        """The device that owns a parameter of ``dsv4.weights.parameters``."""
        return self.layer_devices[_home_layer(name, len(self.layer_devices))]


def bytes_by_layer(sizes: Iterable[tuple[str, int]], layers: int) -> list[int]:
    """Sums (parameter name, bytes) over the layers, those of the embedding and the head with the
    layers they live with.
    """
    totals = [0] * layers
    for name, nbytes in sizes:
        totals[_home_layer(name, layers)] += nbytes
    return totals


def _balanced_ends(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Where ``parts`` consecutive parts of ``sizes`` end: the largest part is as small as it can
    be, and of such cuts the parts are as equal as possible.
    """
    total = [0, *accumulate(sizes)]
    # The best cut of the first ``end`` sizes: largest part, sum of squares, ends.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(parts):
        best = {
            end: min(
                (
                    max(largest, total[end] - total[start]),
                    squares + (total[end] - total[start]) ** 2,
                    (*ends, end),
                )
                for start, (largest, squares, ends) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(total))
        }
    return best[len(sizes)][2]


def _home_layer(name: str, layers: int) -> int:
    """The layer that a parameter lives with."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    return 0 if name.startswith("embed.") else layers - 1
