"""Where the time of one decoded token goes, from the events that its devices recorded.

Kernels of a step follow each other, on one device after the other, so the token's time is the sum
of what every kernel adds, the gaps between kernels of one device, and the hops from device to
device. Where devices share the head, a kernel adds what it ends later than those before it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from dsv4.errors import UserError
from dsv4.measure.profile_table import Row, format_table

GAPS = "(gaps between kernels)"
HOPS = "(hops between devices)"
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel, copy or memset that a device executed. Times in µs, one clock for all devices."""

    name: str
    device: int
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def is_copy(self) -> bool:
        """Whether it is no kernel."""
        return self.name.startswith(_COPIES)


@dataclass(frozen=True)
class StepLaunch:
    """A kernel of the recorded step and its place there: part, layer and the layer's kind, or the
    head.
    """

    name: str
    part: str
    layer: int | None
    kind: str


@dataclass(frozen=True)
class Node:
    """A kernel in its token.

    ``added_us`` is its duration less what overlaps the kernel before, ``gap_us`` the time since
    that one ended. After a ``hop`` the kernel before was on another device.
    """

    name: str
    part: str
    layer: int | None
    kind: str
    device: int
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
        """By kind, the kernels of a layer in their order with the mean µs that each adds to the
        token, its gap included and hops left out; of the layers that launch what most layers of
        their kind do.
        """
        layers: defaultdict[tuple[int, str], list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node.layer is not None:
                layers[node.layer, node.kind].append(node)
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
        by_name: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, kind, us in self._shares():
            counts[name] += 1
            by_name[name][kind] += us
        layers = Counter(kind for kind, _ in {(node.kind, node.layer) for node in self.nodes})
        gaps: defaultdict[str, float] = defaultdict(float)
        for node in self.nodes:
            gaps[node.name] += 0 if node.hop else node.gap_us
        rows = []
        for name, by_kind in by_name.items():
            means = {kind: us / layers[kind] for kind, us in by_kind.items()}
            gap = None if name in (GAPS, HOPS) else gaps[name]
            rows.append(Row(name, counts[name], sum(by_kind.values()), means, gap))
        return rows

    def _shares(self) -> Iterator[tuple[str, str, float]]:
        """(kernel, gaps or hops; kind; µs) of everything that makes the token's time."""
        for node in self.nodes:
            yield node.name, node.kind, node.added_us
            if node.gap_us > 0:
                yield HOPS if node.hop else GAPS, node.kind, node.gap_us

    def table(self) -> str:
        """The rows, what they sum up to, a line per device, and the kernels of a layer of every
        kind in their order.
        """
        copies = sum(event.duration_us for event in self.hand_offs)
        lines = [
            format_table("decode, one token", self.rows(), self.us),
            f"  {self.us:.1f} µs in all: gaps {self.gap_us:.1f}, hops {self.hop_us:.1f} "
            f"({len(self.hand_offs)} hand-off copies take {copies:.1f})",
            "  a kernel counts from the end of the one before: "
            "after an early start its row holds what it waited for",
        ]
        for device, busy in self.busy_us().items():
            idle = self.us - busy
            lines.append(
                f"  cuda:{device} busy {busy:.1f} µs, "
                f"idle {idle:.1f} µs ({100 * idle / self.us:.1f} %)"
            )
        for kind, sequence in self.layer_sequences().items():
            lines.append(f"  {kind}: " + " · ".join(f"{name} {us:.1f}" for name, us in sequence))
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The sums, for a JSON file."""
        kind_of = {node.layer: node.kind for node in self.nodes}
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
                {"name": row.name, "count": row.count, "us": row.us, "gap_before_us": row.gap_us}
                for row in self.rows()
            ],
            "us_per_layer": {kind: mean(values) for kind, values in by_kind.items()},
            "layer_sequences": self.layer_sequences(),
            "busy_us": self.busy_us(),
        }

    def node_records(self) -> list[dict[str, Any]]:
        """Every kernel in its place."""
        return [asdict(node) for node in self.nodes]


def token_timelines(
    events: Iterable[DeviceEvent], step: Mapping[int, Sequence[StepLaunch]], tokens: int
) -> list[TokenTimeline]:
    """The second and later ones of ``tokens`` tokens whose events, from the first to the last, are
    ``events``.

    ``step``: what every device launches for one token, in order. A device executes launches in
    their order, so the n-th kernel of a token is the n-th launch. Raises ``UserError`` when a
    device executed another number of kernels.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, event.end_us))
    copies = [event for event in ordered if event.is_copy]
    executed = [event for event in ordered if not event.is_copy]
    by_token: list[list[tuple[DeviceEvent, StepLaunch]]] = [[] for _ in range(tokens)]
    for device in sorted({*step, *[event.device for event in executed]}):
        launches = step.get(device, ())
        kernels = [event for event in executed if event.device == device]
        if len(kernels) != tokens * len(launches):
            raise UserError(
                f"--profile: found {len(kernels)} kernels on cuda:{device}, "
                f"expected {tokens} tokens of {len(launches)} each"
            )
        for index, event in enumerate(kernels):
            token, place = divmod(index, len(launches))
            by_token[token].append((event, launches[place]))
    for kernels in by_token:
        kernels.sort(key=lambda kernel: (kernel[0].end_us, kernel[0].start_us))
    return [_timeline(before[-1][0], kernels, copies) for before, kernels in pairwise(by_token)]


def median_token(timelines: Sequence[TokenTimeline]) -> TokenTimeline:
    """The one whose wall time is the (lower) median; there must be one."""
    return sorted(timelines, key=lambda timeline: timeline.us)[(len(timelines) - 1) // 2]


def _timeline(
    before: DeviceEvent,
    kernels: Sequence[tuple[DeviceEvent, StepLaunch]],
    copies: Sequence[DeviceEvent],
) -> TokenTimeline:
    """``before``: the last kernel of the token before."""
    last = kernels[-1][0]
    own_copies = [copy for copy in copies if before.end_us <= copy.start_us <= last.start_us]
    nodes = tuple(_nodes(before, kernels))
    return TokenTimeline(last.end_us - before.end_us, nodes, tuple(own_copies))


def _nodes(
    before: DeviceEvent, kernels: Sequence[tuple[DeviceEvent, StepLaunch]]
) -> Iterator[Node]:
    device = before.device
    end_us = before.end_us
    for event, launch in kernels:
        gap = max(0.0, event.start_us - end_us)
        added = max(0.0, event.end_us - max(event.start_us, end_us))
        yield Node(
            launch.name,
            launch.part,
            launch.layer,
            launch.kind,
            event.device,
            event.start_us - before.end_us,
            event.duration_us,
            added,
            gap,
            event.device != device,
        )
        device = event.device
        end_us = max(end_us, event.end_us)
