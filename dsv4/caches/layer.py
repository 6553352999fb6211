"""The state of a sequence in one layer: its window keys, compressed entries and index keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO
from dsv4.limits import MAX_TAKEN_BACK


@dataclass(frozen=True)
class KeySet:
    """Where a layer's keys are. ``compressed`` is None for sliding-window-only layers (ratio 0)."""

    ring: RowCache
    compressed: RowCache | None
    ratio: int
    window: int


def history_tokens(ratio: int) -> int:
    """Tokens before a chunk that an entry completed inside it can need: the windows it pools."""
    return 2 * ratio if ratio == CSA_RATIO else ratio


@dataclass(frozen=True)
class CompressorRing:
    """Projections of recent tokens by absolute position: float32 ``kv`` and ``score`` (positional
    bias included), ``[slots, w]``.
    """

    kv: Tensor
    score: Tensor

    @classmethod
    def allocate(cls, ratio: int, width: int, device: torch.device) -> "CompressorRing":
        """Room for the windows an open entry needs plus what can be taken back
        (``MAX_TAKEN_BACK``).
        """
        slots = history_tokens(ratio) + MAX_TAKEN_BACK
        return cls(
            *(torch.zeros((slots, width), dtype=torch.float32, device=device) for _ in range(2))
        )

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.score.nbytes


@dataclass(frozen=True)
class CompressedState:
    """A compressor's ring of recent projections and the rows it has emitted, entry m in slot m."""

    ring: CompressorRing
    rows: RowCache

    @property
    def nbytes(self) -> int:
        return self.ring.nbytes + self.rows.nbytes


@dataclass(frozen=True)
class AttentionState:
    """Caches of one layer: window ring and, by ratio, compressed entries and index keys."""

    keys: KeySet
    compressed: CompressedState | None
    index: CompressedState | None
