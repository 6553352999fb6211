"""Time per op, or per kernel of recorded steps, of an eager run: an ``Observer`` of its steps."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dsv4.measure.profile_table import DRAFT, HEAD, Row, format_table

BETWEEN_OPS = "(between ops)"
BETWEEN_STEPS = "(between steps)"
HAND_OFFS = "(hand-offs)"
# In place of the kind of a layer: hand-offs belong to none.
BETWEEN_DEVICES = "between devices"


class OpProfile:
    """Seconds and calls by name, apart for prefill and decode and for the kinds of layers.

    Waits for the devices around everything that it times, so that its time is its own; this slows
    the run down. The gaps between are counted too.
    """

    def __init__(
        self, devices: Sequence[torch.device], kinds: Sequence[str], ranks: int = 1
    ) -> None:
        """``devices``: those of the steps, in the order of the ``ranks`` where each has its own;
        ``kinds``: the kind of every layer.
        """
        self.phase = "prefill"
        self.calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self.seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        # How often a step came to a layer of a kind, and to its head, by phase and kind.
        self.visits: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._devices = [device for device in devices if device.type == "cuda"]
        self._ranks = {device: rank for rank, device in enumerate(devices)} if ranks > 1 else {}
        self._rank = ""
        self._kinds = kinds
        self._kind = HEAD
        self._layer: int | None = None
        self._gap = BETWEEN_OPS
        self._ended: float | None = None

    def next_phase(self, phase: str) -> None:
        """Counts everything that follows as ``phase``."""
        self.phase = phase

    def begin_step(self) -> None:
        """The time since the step before is between them."""
        self.visits[self.phase, HEAD] += 1
        self._layer = None
        self._gap = BETWEEN_STEPS

    @contextmanager
    def part(self, name: str, device: torch.device, layer: int | None) -> Iterator[None]:
        """Counts every op inside for the layer's kind, for drafts or for the head, and for its rank
        where there are several.
        """
        self._rank = f", rank {self._ranks[device]}" if self._ranks else ""
        self._kind = HEAD if layer is None else self._kinds[layer]
        if name == DRAFT:
            self._kind = DRAFT
            self.visits[self.phase, DRAFT] += 1
        if layer is not None and layer != self._layer:
            self._layer = layer
            self.visits[self.phase, self._kind] += 1
        yield

    def item(self, name: str) -> AbstractContextManager[None]:
        """Times an op or kernel of the open part."""
        return self._timed(self._kind, name + self._rank)

    def hand_off(self, source: torch.device, target: torch.device) -> AbstractContextManager[None]:
        """Times a copy to another device."""
        return self._timed(BETWEEN_DEVICES, HAND_OFFS)

    @contextmanager
    def _timed(self, kind: str, name: str) -> Iterator[None]:
        """Counts the gap before the block, and the block unless it fails."""
        begun = self._now()
        if self._ended is not None:
            gap_kind = HEAD if self._gap == BETWEEN_STEPS else kind
            self._count(gap_kind, self._gap, begun - self._ended)
        self._gap = BETWEEN_OPS
        yield
        self._ended = self._now()
        self._count(kind, name, self._ended - begun)

    def _count(self, kind: str, name: str, seconds: float) -> None:
        self.calls[self.phase, kind, name] += 1
        self.seconds[self.phase, kind, name] += seconds

    def _now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def record(self) -> dict[str, Any]:
        """One record per phase, kind of layer and op, for the ``--json`` file."""
        return {
            "mode": "eager",
            "ops": [
                {
                    "phase": phase,
                    "kind": kind,
                    "op": name,
                    "calls": self.calls[phase, kind, name],
                    "seconds": seconds,
                }
                for (phase, kind, name), seconds in self.seconds.items()
            ],
        }

    def table(self) -> str:
        """One block per phase, the slowest first, with µs per layer of every kind."""
        phases = dict.fromkeys(phase for phase, *_ in self.seconds)
        return "\n".join(self._phase_table(phase) for phase in phases)

    def _phase_table(self, phase: str) -> str:
        counts: defaultdict[str, int] = defaultdict(int)
        by_name: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (of_phase, kind, name), seconds in self.seconds.items():
            if of_phase == phase:
                by_name[name][kind] = 1e6 * seconds
                counts[name] += self.calls[phase, kind, name]
        rows = []
        for name, by_kind in by_name.items():
            means = {kind: us / max(1, self.visits[phase, kind]) for kind, us in by_kind.items()}
            rows.append(Row(name, counts[name], sum(by_kind.values()), means))
        return format_table(phase, rows, sum(row.us for row in rows))
