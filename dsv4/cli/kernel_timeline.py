"""Where the time of one decoded token goes, from the events that its devices recorded.

Kernels of a step follow each other, on one device after the other, so the token's time is the sum of what every kernel
adds, the gaps between kernels of one device, and the hops from device to device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from dsv4.cli.profile_table import Row, format_table

# Kernels that mark places in a step: the first of a device's layers, the last of every layer, the one that mixes a
# layer's result in, the last of a step.
_FIRST_OF_LAYERS, _LAST_OF_LAYER, _MIX, _LAST_OF_STEP = "hc_mix", "moe_decode", "hc_post", "store_token"
_COPIES_BETWEEN_DEVICES = ("Memcpy PtoP", "Memcpy DtoH", "Memcpy HtoD")
GAPS, HOPS = "(gaps between kernels)", "(hops between devices)"


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel, copy or memset. Times in µs, of one clock for all devices."""

    name: str
    device: int
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def is_hand_off(self) -> bool:
        """Whether it copies to another device, or through the host on the way there."""
        return self.name.startswith(_COPIES_BETWEEN_DEVICES)


@dataclass(frozen=True)
class Node:
    """A kernel in its token. ``part``: the kind of its ``layer``, else "start" or "head".

    ``added_us`` is its duration less what overlaps the kernel before, ``gap_us`` the time since that one ended. After a
    ``hop`` the kernel before was on another device.
    """

    name: str
    device: int
    layer: int | None
    part: str
    start_us: float
    duration_us: float
    added_us: float
    gap_us: float
    hop: bool


@dataclass(frozen=True)
class TokenTimeline:
    """One decoded token: its kernels in their order, and its hand-off copies. ``us``: wall time."""

    us: float
    nodes: tuple[Node, ...]
    hand_offs: tuple[DeviceEvent, ...]

    @property
    def gap_us(self) -> float:
        return sum(node.gap_us for node in self.nodes if not node.hop)

    @property
    def hop_us(self) -> float:
        return sum(node.gap_us for node in self.nodes if node.hop)

    def busy_us(self) -> dict[int, float]:
        """What the kernels of each device added; the rest of ``us`` the device was idle."""
        busy: defaultdict[int, float] = defaultdict(float)
        for node in self.nodes:
            busy[node.device] += node.added_us
        return dict(sorted(busy.items()))

    def layer_us(self) -> dict[int, float]:
        """Kernels and gaps of every layer, hops left out."""
        layers: defaultdict[int, float] = defaultdict(float)
        for node in self.nodes:
            if node.layer is not None:
                layers[node.layer] += node.added_us + (0 if node.hop else node.gap_us)
        return dict(sorted(layers.items()))

    def layer_sequences(self) -> dict[str, list[tuple[str, float]]]:
        """By kind, the kernels of a layer in their order with the mean µs that each adds to the token, its gap included
        and hops left out; of the layers that launch what most layers of their kind do.
        """
        layers: defaultdict[tuple[int, str], list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node.layer is not None:
                layers[node.layer, node.part].append(node)
        by_kind: defaultdict[str, defaultdict[tuple[str, ...], list[list[Node]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for (_, kind), nodes in layers.items():
            by_kind[kind][tuple(node.name for node in nodes)].append(nodes)
        sequences = {}
        for kind, alike in by_kind.items():
            names, chosen = max(alike.items(), key=lambda item: len(item[1]))
            sequences[kind] = [
                (name, mean(node.added_us + (0 if node.hop else node.gap_us) for node in at_place))
                for name, at_place in zip(names, zip(*chosen, strict=True), strict=True)
            ]
        return sequences

    def rows(self) -> list[Row]:
        """A row per kernel name, the gaps and the hops; together they are the token."""
        counts: defaultdict[str, int] = defaultdict(int)
        by_part: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, part, us in self._shares():
            counts[name] += 1
            by_part[name][part] += us
        layers = Counter(part for part, _ in {(node.part, node.layer) for node in self.nodes})
        rows = []
        for name, parts in by_part.items():
            means = {part: us / layers[part] for part, us in parts.items()}
            gap = None if name in (GAPS, HOPS) else sum(n.gap_us for n in self.nodes if n.name == name and not n.hop)
            rows.append(Row(name, counts[name], sum(parts.values()), means, gap))
        return rows

    def _shares(self) -> Iterator[tuple[str, str, float]]:
        """(kernel, gaps or hops; part; µs) of everything that makes the token's time."""
        for node in self.nodes:
            yield node.name, node.part, node.added_us
            if node.gap_us > 0:
                yield HOPS if node.hop else GAPS, node.part, node.gap_us

    def table(self) -> str:
        """The rows, what they sum up to, a line per device, and the kernels of a layer of every kind in their order."""
        copies = sum(event.duration_us for event in self.hand_offs)
        lines = [
            format_table("decode, one token", self.rows(), self.us),
            f"  {self.us:.1f} µs in all: gaps {self.gap_us:.1f}, hops {self.hop_us:.1f} "
            f"({len(self.hand_offs)} hand-off copies take {copies:.1f})",
            "  a kernel counts from the end of the one before: after an early start its row holds what it waited for",
        ]
        for device, busy in self.busy_us().items():
            idle = self.us - busy
            lines.append(f"  cuda:{device} busy {busy:.1f} µs, idle {idle:.1f} µs ({100 * idle / self.us:.1f} %)")
        for kind, sequence in self.layer_sequences().items():
            lines.append(f"  {kind}: " + " · ".join(f"{name} {us:.1f}" for name, us in sequence))
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The sums, for a JSON file."""
        kind_of = {node.layer: node.part for node in self.nodes}
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for layer, us in self.layer_us().items():
            by_kind[kind_of[layer]].append(us)
        return {
            "us": self.us,
            "gap_us": self.gap_us,
            "hop_us": self.hop_us,
            "hops": sum(node.hop for node in self.nodes),
            "hand_off_copies": len(self.hand_offs),
            "hand_off_copy_us": sum(event.duration_us for event in self.hand_offs),
            "kernels": [
                {"name": row.name, "count": row.count, "us": row.us, "gap_before_us": row.gap_us} for row in self.rows()
            ],
            "us_per_layer": {kind: mean(values) for kind, values in by_kind.items()},
            "layer_sequences": self.layer_sequences(),
            "busy_us": self.busy_us(),
        }

    def node_records(self) -> list[dict[str, Any]]:
        """Every kernel in its place."""
        return [asdict(node) for node in self.nodes]


def token_timelines(
    events: Iterable[DeviceEvent], layers: Mapping[int, Sequence[int]], kinds: Sequence[str]
) -> list[TokenTimeline]:
    """Every token that ``events`` hold from end to end.

    ``layers``: the layers of every device in their order; ``kinds``: the kind of every layer. The token that was under
    way when recording began is left out.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, event.end_us))
    borders = [event for event in ordered if event.name == _LAST_OF_STEP]
    timelines = []
    for before, last in pairwise(borders):
        step = [event for event in ordered if before.end_us <= event.start_us <= last.start_us]
        kernels = [event for event in step if not event.is_hand_off]
        places = _places(kernels, layers, kinds)
        nodes = tuple(_nodes(before, kernels, places))
        copies = tuple(event for event in step if event.is_hand_off)
        timelines.append(TokenTimeline(last.end_us - before.end_us, nodes, copies))
    return timelines


def median_token(timelines: Sequence[TokenTimeline]) -> TokenTimeline:
    """The one whose wall time is the (lower) median; there must be one."""
    return sorted(timelines, key=lambda timeline: timeline.us)[(len(timelines) - 1) // 2]


def _places(
    kernels: Sequence[DeviceEvent], layers: Mapping[int, Sequence[int]], kinds: Sequence[str]
) -> list[tuple[int | None, str]]:
    """(layer, part) of every kernel: the k-th ``moe_decode`` of a device closes its k-th layer."""
    done: defaultdict[int, int] = defaultdict(int)
    begun: set[int] = set()
    places: list[tuple[int | None, str]] = []
    for event in kernels:
        if event.name == _FIRST_OF_LAYERS:
            begun.add(event.device)
        index = done[event.device] - (event.name == _MIX)
        if event.device not in begun:
            places.append((None, "start"))
        elif 0 <= index < len(layers[event.device]):
            layer = layers[event.device][index]
            places.append((layer, kinds[layer]))
        else:
            places.append((None, "head"))
        done[event.device] += event.name == _LAST_OF_LAYER
    return places


def _nodes(
    before: DeviceEvent, kernels: Sequence[DeviceEvent], places: Sequence[tuple[int | None, str]]
) -> Iterator[Node]:
    device, end_us = before.device, before.end_us
    for event, (layer, part) in zip(kernels, places, strict=True):
        gap = max(0.0, event.start_us - end_us)
        added = max(0.0, event.end_us - max(event.start_us, end_us))
        start, hop = event.start_us - before.end_us, event.device != device
        yield Node(event.name, event.device, layer, part, start, event.duration_us, added, gap, hop)
        device, end_us = event.device, max(end_us, event.end_us)
