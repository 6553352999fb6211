"""DraftState: what a draft module keeps of a sequence, addressed by position."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.config import ModelConfig
from dsv4.limits import MAX_DECODE_TOKENS, MAX_TAKEN_BACK

# Recent positions whose rows are kept: as many as a step has, behind those that can be taken back.
RECENT_POSITIONS = MAX_TAKEN_BACK + MAX_DECODE_TOKENS + 1


@dataclass
class DraftState:
    """``stages``: the window keys of every block. ``streams_SME``: of classic MTP, the main model's
    streams of recent positions, those of position p in slot p mod slots.

    Rows of positions that are taken back are overwritten when the positions come again, so nothing
    has to be undone. The rows of the positions from ``first`` to ``end`` are the sequence's own.
    ``position_1`` and ``rejected_1``: of the module's embedding look-ups (``dsv4.ops.opening``).
    ``module``: which one it is; the rows are of no use to another.
    """

    stages: tuple[KeySet, ...]
    streams_SME: Tensor | None
    position_1: Tensor
    rejected_1: Tensor
    first: int = 0
    end: int = 0
    module: str = ""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        stages: int,
        rows: RowFormat,
        dtype: torch.dtype,
        device: torch.device,
        keeps_streams: bool,
        module: str = "",
    ) -> "DraftState":
        """For a module of ``stages`` blocks; ``dtype`` is that of streams and of PLAIN ``rows``."""
        window = config.sliding_window
        slots = window + RECENT_POSITIONS
        widths = (config.head_dim, config.qk_rope_head_dim)
        rings = [RowCache.allocate(slots, *widths, rows, dtype, device) for _ in range(stages)]
        streams_SME = None
        if keeps_streams:
            shape = (RECENT_POSITIONS, config.hc_mult, config.hidden_size)
            streams_SME = torch.zeros(shape, dtype=dtype, device=device)
        position_1, rejected_1 = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)
        )
        keys = tuple(KeySet(ring, None, 0, window) for ring in rings)
        return cls(keys, streams_SME, position_1, rejected_1, module=module)

    @property
    def remembered_rows(self) -> int:
        """The last rows of a long step that a later draft can read."""
        return self.stages[0].window + MAX_TAKEN_BACK

    def begin(self, start: int, tokens: int) -> None:
        """Notes that the rows of ``tokens`` positions from ``start`` on are written next. Behind a
        gap those before them are not the sequence's, and further back than tokens are taken back
        they are those of later positions.
        """
        if not self.first <= start <= self.end <= start + MAX_TAKEN_BACK:
            self.first = start
        self.end = start + tokens

    def forget(self) -> None:
        """No row is of the sequence that comes now, wherever it begins."""
        self.first = 0
        self.end = -1

    def covers(self, position: int) -> bool:
        """Whether all rows are there that drafts behind ``position`` tokens read."""
        reached = position <= self.end <= position + MAX_TAKEN_BACK
        return reached and self.first <= max(0, position - self.stages[0].window)

    def streams_at(self, position: int) -> Tensor:
        """The main model's streams ``[1, M, E]`` of a recent position."""
        assert self.streams_SME is not None, "only classic MTP keeps streams"
        slot = position % self.streams_SME.shape[0]
        return self.streams_SME[slot : slot + 1]

    def keep_streams(self, streams_TME: Tensor, end: int) -> None:
        """Stores the last of the main model's streams ``[T, M, E]`` of the T positions before
        ``end``.
        """
        assert self.streams_SME is not None, "only classic MTP keeps streams"
        slots = self.streams_SME.shape[0]
        kept = streams_TME[-slots:]
        positions = torch.arange(end - kept.shape[0], end, device=kept.device)
        self.streams_SME.index_copy_(0, positions % slots, kept)

    def rows_begin(self, position: int, undoable: int) -> int:
        """The first row that drafts read behind ``position`` tokens, or behind up to ``undoable``
        tokens less.
        """
        return max(0, position - undoable - self.stages[0].window)

    def is_whole(self, position: int, undoable: int) -> bool:
        """Whether all rows from ``rows_begin`` on are there."""
        return self.covers(position) and self.first <= self.rows_begin(position, undoable)

    def resume(self, position: int, undoable: int) -> None:
        """Notes that the rows from ``rows_begin`` to ``position`` are there, and no others."""
        self.first = self.rows_begin(position, undoable)
        self.end = position

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Every buffer."""
        for keys in self.stages:
            yield keys.ring.data
            if keys.ring.block_scale is not None:
                yield keys.ring.block_scale
        if self.streams_SME is not None:
            yield self.streams_SME
        yield from (self.position_1, self.rejected_1)
