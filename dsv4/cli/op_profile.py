"""Time per op of an eager run, measured by wrapping the op table."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch

from dsv4.ops import Ops

LOAD_TIME_OPS = ("pack_weight", "pack_rows")


class OpProfile:
    """Seconds and calls of every op, apart for prefill and decode.

    Waits for the CUDA devices around every call, so that its time is its own; this slows the run down.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.phase = "prefill"
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._on_cuda = on_cuda

    def wrap(self, ops: Ops) -> Ops:
        """The same table with every op of a step timed."""
        names = [field.name for field in fields(ops) if field.name not in LOAD_TIME_OPS]
        return replace(ops, **{name: self._timed(name, getattr(ops, name)) for name in names})

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            result = op(*args, **kwargs)
            self.seconds[self.phase, name] += self._now() - started
            self.calls[self.phase, name] += 1
            return result

        return timed

    def _now(self) -> float:
        if self._on_cuda:
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def rows(self) -> list[dict[str, Any]]:
        """One record per phase and op."""
        return [
            {"phase": phase, "op": name, "calls": self.calls[phase, name], "seconds": seconds}
            for (phase, name), seconds in self.seconds.items()
        ]

    def table(self, phase_seconds: dict[str, float]) -> str:
        """One block per phase, the slowest op first; ``phase_seconds`` adds the time outside the ops."""
        lines = []
        for phase, total in phase_seconds.items():
            of_phase = {name: seconds for (key, name), seconds in self.seconds.items() if key == phase}
            rows = [(seconds, name, self.calls[phase, name]) for name, seconds in of_phase.items()]
            rows.append((total - sum(seconds for seconds, *_ in rows), "(outside ops)", 0))
            lines.append(f"{phase:<18} {'calls':>7} {'ms':>10} {'%':>6}")
            for seconds, name, calls in sorted(rows, reverse=True):
                share = 100 * seconds / total if total > 0 else 0.0
                lines.append(f"  {name:<16} {calls or '':>7} {1000 * seconds:>10.2f} {share:>6.1f}")
        return "\n".join(lines)
