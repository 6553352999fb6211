"""Placement: the devices of every layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch

from dsv4.engine_config import EngineConfig
from dsv4.weights.parameters import layer_of


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, and the devices of the ranks that share each of them.

    Ranks are known by their number, because several may be on one device.
    """

    layers: tuple[int, ...]
    devices: tuple[torch.device, ...]


@dataclass(frozen=True)
class Placement:
    """All layers in stages, which have as many ranks each; the embedding is with the first layer,
    everything else with the last. What a rank holds of a layer is in ``dsv4.parallel.sharding``.

    ``absent_ranks``: further ranks that the layers are cut for and that are not there. Their
    traffic goes between two ranks that are, and what comes of it means nothing: for timings.
    """

    stages: tuple[Stage, ...]
    absent_ranks: int = 0

    @classmethod
    def of(
        cls, engine: EngineConfig, devices: Sequence[torch.device], layer_bytes: Sequence[int]
    ) -> "Placement":
        """The placement that ``engine`` asks for on ``devices``; ``layer_bytes`` as from
        ``bytes_by_layer``.
        """
        if engine.parallel == "tensor":
            return cls.tensor(len(layer_bytes), devices)
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
        return cls.of_layers(
            [device for device, count in zip(devices, counts, strict=False) for _ in range(count)]
        )

    @classmethod
    def round_robin(cls, layers: int, devices: Sequence[torch.device]) -> "Placement":
        """Layer l on device l mod N: a token crosses between devices at every layer."""
        return cls.of_layers([devices[layer % len(devices)] for layer in range(layers)])

    @classmethod
    def tensor(cls, layers: int, devices: Sequence[torch.device]) -> "Placement":
        """Every layer on all devices, which are those of the ranks in their order."""
        return cls((Stage(tuple(range(layers)), tuple(devices)),))

    @classmethod
    def of_layers(cls, layer_devices: Sequence[torch.device]) -> "Placement":
        """One rank, with layer l on ``layer_devices[l]``."""
        runs = groupby(range(len(layer_devices)), key=layer_devices.__getitem__)
        return cls(tuple(Stage(tuple(layers), (device,)) for device, layers in runs))

    @property
    def ranks(self) -> int:
        return len(self.stages[0].devices)

    @property
    def cuts(self) -> int:
        """The ranks that layers are cut for."""
        return self.ranks + self.absent_ranks

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device once."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    def ranks_on(self, device: torch.device) -> int:
        """How many ranks share a device."""
        return max(stage.devices.count(device) for stage in self.stages)

    def of_rank(self, rank: int) -> "Placement":
        """The placement as one rank sees it."""
        stages = (replace(stage, devices=(stage.devices[rank],)) for stage in self.stages)
        return Placement(tuple(stages))

    @cached_property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """The device of every layer. Raises ``ValueError`` with several ranks (``of_rank``)."""
        if self.ranks > 1:
            raise ValueError(f"placement: found {self.ranks} ranks, expected the placement of one")
        return tuple(stage.devices[0] for stage in self.stages for _ in stage.layers)

    def devices_of(self, name: str) -> tuple[torch.device, ...]:
        """The devices of the ranks that hold a parameter, or a part of it."""
        layers = sum(len(stage.layers) for stage in self.stages)
        home = _home_layer(name, layers)
        (devices,) = (stage.devices for stage in self.stages if home in stage.layers)
        return devices

    def device_of(self, name: str) -> torch.device:
        """The device that owns a parameter. Raises ``ValueError`` with several ranks."""
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
