"""Sampled tokens on their way to the host, which may be several steps behind the device."""

import torch
from torch import Tensor

from dsv4.ops import Ops

RING_TOKENS = 16


class TokenRing:
    """A ring of pinned memory: the device stores the token of position p in slot p mod 16, an event tells the host."""

    def __init__(self, device: torch.device, ops: Ops) -> None:
        self._device, self._ops = device, ops
        self._tokens = torch.zeros(RING_TOKENS, dtype=torch.int64, pin_memory=True)
        self._stored = [torch.cuda.Event() for _ in range(RING_TOKENS)]

    def store(self, token: Tensor, position_1: Tensor, next_1: Tensor) -> None:
        """Queues ``Ops.store_token``; may be captured."""
        self._ops.store_token(token, position_1, next_1, self._tokens)

    def mark(self, position: int) -> None:
        """The store for ``position`` is what was last queued on the device's current stream."""
        self._stored[position % RING_TOKENS].record(torch.cuda.current_stream(self._device))

    def read(self, position: int) -> int:
        """Waits for the token of ``position``, marked at most 16 marks ago."""
        self._stored[position % RING_TOKENS].synchronize()
        return int(self._tokens[position % RING_TOKENS])
