"""Time per op of an eager run, measured by wrapping the op table."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch

from dsv4.cli.profile_table import Row, format_table
from dsv4.ops import Ops

LOAD_TIME_OPS = ("pack_weight", "pack_rows")
HEAD = "head"
BETWEEN_OPS, BETWEEN_STEPS, HAND_OFFS = "(between ops)", "(between steps)", "(hand-offs)"


class OpProfile:
    """Seconds and calls of every op, apart for prefill and decode and for the kinds of layers, and of the gaps between.

    Waits for the CUDA devices around every call, so that its time is its own; this slows the run down. A layer ends
    with its ``moe``. A gap between ops of two devices is a hand-off, the host's time around it included.
    """

    def __init__(self, on_cuda: bool, kinds: Sequence[str]) -> None:
        """``kinds``: the kind of every layer."""
        self.phase = "prefill"
        self.calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self.seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._on_cuda = on_cuda
        self._kinds = kinds
        self._layer = 0
        self._ended: tuple[float, torch.device] | None = None

    def wrap(self, ops: Ops) -> Ops:
        """The same table with every op of a step timed."""
        names = [field.name for field in fields(ops) if field.name not in LOAD_TIME_OPS]
        return replace(ops, **{name: self._timed(name, getattr(ops, name)) for name in names})

    def next_phase(self, phase: str) -> None:
        """What follows counts as ``phase``."""
        self.phase = phase

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            device = next(argument.device for argument in args if isinstance(argument, torch.Tensor))
            kind = self._enter(name, started, device)
            result = op(*args, **kwargs)
            ended = self._now()
            self._count(kind, name, ended - started)
            self._ended = ended, device
            return result

        return timed

    def _enter(self, name: str, started: float, device: torch.device) -> str:
        """Counts the gap before an op; the kind of the layer that it belongs to."""
        new_step = name == "embed"
        if new_step:
            self._layer = 0
        # A mix belongs to the layer whose result it mixes in.
        layer = self._layer - 1 if name == "hc_post" else self._layer
        kind = HEAD if new_step or layer == len(self._kinds) else self._kinds[layer]
        if self._ended is not None:
            before, device_before = self._ended
            gap = BETWEEN_STEPS if new_step else BETWEEN_OPS if device == device_before else HAND_OFFS
            self._count(kind, gap, started - before)
        self._layer += name == "moe"
        return kind

    def _count(self, kind: str, name: str, seconds: float) -> None:
        self.calls[self.phase, kind, name] += 1
        self.seconds[self.phase, kind, name] += seconds

    def _now(self) -> float:
        if self._on_cuda:
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def record(self) -> dict[str, Any]:
        """One record per phase, kind of layer and op, for the ``--json`` file."""
        return {
            "mode": "eager",
            "ops": [
                {"phase": phase, "kind": kind, "op": name, "calls": self.calls[phase, kind, name], "seconds": seconds}
                for (phase, kind, name), seconds in self.seconds.items()
            ],
        }

    def table(self) -> str:
        """One block per phase, the slowest op first, with µs per layer of every kind."""
        phases = dict.fromkeys(phase for phase, *_ in self.seconds)
        return "\n".join(self._phase_table(phase) for phase in phases)

    def _phase_table(self, phase: str) -> str:
        counts: defaultdict[str, int] = defaultdict(int)
        by_name: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (of_phase, kind, name), seconds in self.seconds.items():
            if of_phase == phase:
                by_name[name][kind] = 1e6 * seconds
                counts[name] += self.calls[phase, kind, name]
        # A step's head has one collapse; a prefill may have more steps than heads.
        per_kind = {kind: max(1, self.calls[phase, kind, "moe"]) for kind in self._kinds}
        per_kind[HEAD] = max(1, self.calls[phase, HEAD, "hc_head"])
        rows = [
            Row(name, counts[name], sum(by_kind.values()), {kind: us / per_kind[kind] for kind, us in by_kind.items()})
            for name, by_kind in by_name.items()
        ]
        return format_table(phase, rows, sum(row.us for row in rows))
