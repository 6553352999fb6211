"""CUDA ops one at a time: recorded, given memory and run. For tests and benchmarks; a step records
all of its ops once instead (``dsv4.step``).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

import torch

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import Ops
from dsv4.ops.tables import CUDA_TABLE, DirectTable, RecordedTable, Table
from dsv4.ops.trees import map_tensors, tensors_in


class PreparedOp:
    """An op on given tensors, ready to run again and again; every run overwrites ``result``."""

    _starts_early = False

    def __init__(
        self, op: Callable[..., Any], *arguments: Any, tokens: int | None = None, **named: Any
    ) -> None:
        """``op(recording, *arguments, **named)`` records it. ``tokens``: by default the first size
        of the first tensor among the arguments.
        """
        first = next(tensors_in([list(arguments), list(named.values())]))
        self._tokens = tokens or (first.shape[0] if first.dim() else 1)
        recording = Recording(Target.of(first.device), self._tokens)
        recorded = op(recording, *arguments, **named)
        for tensor in tensors_in(recorded):
            recording.keep(tensor)
        self.program = Program(recording, early=self._starts_early)
        self.result = map_tensors(recorded, self.program.tensor)

    def run(self, tokens: int | None = None, start: int = 0, stop: int | None = None) -> Any:
        """Queues the op on the current stream of its device, for as many tokens as it was recorded
        for or fewer. ``start``, ``stop``: only these of its items.
        """
        with torch.cuda.device(self.program.device):
            self.program.run(tokens or self._tokens, start, stop)
        return self.result


class TimedOp(PreparedOp):
    """A ``PreparedOp`` whose runs follow each other as the launches of a step do: each starts
    before the one in front has ended. Nothing may write what it reads meanwhile.
    """

    _starts_early = True


def immediately(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` without its recording: runs at once and returns memory that nothing else uses."""

    @wraps(op)
    def run(*arguments: Any, **named: Any) -> Any:
        return PreparedOp(op, *arguments, **named).run()

    return run


def ops_of(table: Table) -> Ops:
    """Every op of ``table`` as the torch ops are called."""
    return table.ops if isinstance(table, DirectTable) else immediate_ops(table)


def immediate_ops(table: RecordedTable = CUDA_TABLE) -> Ops:
    """Every op of ``table`` as the torch ops are called."""

    def immediate(name: str) -> Callable[..., Any]:
        def op(recording: Recording, *arguments: Any, **named: Any) -> Any:
            return getattr(table.on(recording), name)(*arguments, **named)

        def run(*arguments: Any, **named: Any) -> Any:
            tokens = arguments[2] if name == "next_positions" else None
            return PreparedOp(op, *arguments, tokens=tokens, **named).run()

        return run

    return Ops(**{field.name: immediate(field.name) for field in fields(Ops)})
