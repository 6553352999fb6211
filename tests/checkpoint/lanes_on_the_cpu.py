"""Lanes that copy to the memory of the host, whose events are over a little later."""

import ctypes
import time
from contextlib import nullcontext

import pytest
import torch

from dsv4.checkpoint import lanes
from dsv4.ops.scatter.cuda import PART_BYTES


class LaterEvent:
    """It is over half a millisecond after it was made."""

    def __init__(self) -> None:
        self._over = time.monotonic() + 0.0005

    def query(self) -> bool:
        return time.monotonic() >= self._over

    def synchronize(self) -> None:
        time.sleep(0.0005)


class LaterScatter:
    """The kernel in plain Python, by the table alone."""

    def __init__(self, target: object, memory: torch.Tensor, stream: object) -> None:
        self._memory = memory

    def queue(self, table: int, parts: int) -> None:
        words = self._memory[table : table + PART_BYTES * parts].view(torch.int64).view(parts, -1)
        for source, target, nbytes, rows, width in words.tolist():
            for row in range(rows):
                at = self._memory.data_ptr() + source + row * width
                ctypes.memmove(target + row * nbytes, at, nbytes)


class LaterStream:
    """A stream whose events are over a little later."""

    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> LaterEvent:
        return LaterEvent()

    def synchronize(self) -> None:
        pass


def put_lanes_on_the_cpu(monkeypatch: pytest.MonkeyPatch, by_table: bool) -> None:
    """``by_table``: as on a GPU that has the kernel."""
    monkeypatch.setattr(lanes, "kernel_target", lambda _: True if by_table else None)
    monkeypatch.setattr(lanes, "Scatter", LaterScatter)
    for name in ("current_stream", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", LaterStream)
