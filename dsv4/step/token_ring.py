"""How the host learns of tokens: rings of pinned memory that steps write, several steps ahead."""

import torch
from torch import Tensor

from dsv4.logprobs import TokenLogprobs, rank_tokens
from dsv4.step.recorder import RING_TOKENS


class TokenRing:
    """A ring of pinned memory: the device stores the token of position p in slot p mod 16, an event
    tells the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tokens = torch.zeros(RING_TOKENS, dtype=torch.int64, pin_memory=True)
        self._stored = [torch.cuda.Event() for _ in range(RING_TOKENS)]

    def mark(self, position: int) -> None:
        """The store for ``position`` is what was last queued on the device's current stream."""
        self._stored[position % RING_TOKENS].record(torch.cuda.current_stream(self._device))

    def read(self, position: int) -> int:
        """Waits for the token of ``position``, marked at most 16 marks ago."""
        self._stored[position % RING_TOKENS].synchronize()
        return int(self.tokens[position % RING_TOKENS])


class LogprobRing:
    """Log-probabilities beside a token ring: those of position p in slot p mod 16 of pinned memory.
    Who reads them has read the token of the position first.
    """

    def __init__(self, count: int, logits_TV: Tensor) -> None:
        """``count`` alternatives for each token, at most as many as there are logits."""
        self._count = min(count, logits_TV.shape[-1])
        shape = (RING_TOKENS, 1 + self._count)
        pinned = logits_TV.is_cuda
        self._ids = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)

    def store(self, position: int, logits_V: Tensor, token: Tensor) -> None:
        """Queues the ranking and its copies on the current stream of the logits' device."""
        ids_N, logprobs_N = rank_tokens(logits_V, token, self._count)
        self._ids[position % RING_TOKENS].copy_(ids_N, non_blocking=True)
        self._logprobs[position % RING_TOKENS].copy_(logprobs_N, non_blocking=True)

    def read(self, position: int) -> TokenLogprobs:
        """What was stored for ``position``."""
        slot = position % RING_TOKENS
        return TokenLogprobs.of(self._ids[slot], self._logprobs[slot])
