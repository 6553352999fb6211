"""The rows of a decode state that later steps can read: what has to be kept to go on with it."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.caches.layer import AttentionState, CompressedState, history_tokens
from dsv4.caches.rows import RowCache

# What the names of a draft module's rows begin with.
DRAFT = "draft."
# What is copied at once between a device and a file.
_PART_BYTES = 16 << 20


class FilledRows(NamedTuple):
    """``count`` rows of ``store`` ``[slots, w]``: row ``first`` of a sequence lies in slot
    ``first`` mod slots, the following ones behind it. ``in_ring``: later tokens of the sequence
    take their slots.
    """

    name: str
    store: Tensor
    first: int
    count: int
    in_ring: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of all rows together."""
        return self.count, self.store.shape[1]

    def parts(self) -> Iterator[Tensor]:
        """Views of ``store`` that hold the rows in their order, each of bounded size."""
        slots, width = self.store.shape
        most = max(1, _PART_BYTES // (width * self.store.itemsize))
        row = self.first
        end = self.first + self.count
        while row < end:
            slot = row % slots
            rows = min(end - row, slots - slot, most)
            yield self.store[slot : slot + rows]
            row += rows


def filled_rows(
    layers: tuple[AttentionState, ...], position: int, undoable: int
) -> Iterator[FilledRows]:
    """What a sequence at ``position`` of which ``undoable`` tokens can be taken back can read, by
    layer. Nothing depends on the length of the rings or on the devices.
    """
    for index, layer in enumerate(layers):
        name = f"layers.{index}"
        keys = layer.keys
        start = max(0, position - undoable - keys.window)
        yield from _rows(f"{name}.window", keys.ring, start, position, in_ring=True)
        for kind, part in (("compressed", layer.compressed), ("index", layer.index)):
            if part is not None:
                yield from _compressed(f"{name}.{kind}", part, keys.ratio, position, undoable)


def filled_draft_rows(draft: DraftState, position: int, undoable: int) -> Iterator[FilledRows]:
    """What a draft module can read behind such a sequence (``DraftState.is_whole``)."""
    start = draft.rows_begin(position, undoable)
    for stage, keys in enumerate(draft.stages):
        yield from _rows(f"{DRAFT}{stage}.window", keys.ring, start, position, in_ring=True)
    if draft.streams_SME is not None:
        # The last streams go into the row that the next token brings.
        start = max(0, position - undoable - 1)
        streams = draft.streams_SME.flatten(1)
        yield FilledRows(f"{DRAFT}streams", streams, start, position - start, in_ring=True)


def _compressed(
    name: str, part: CompressedState, ratio: int, position: int, undoable: int
) -> Iterator[FilledRows]:
    yield from _rows(name, part.rows, 0, position // ratio, in_ring=False)
    start = max(0, position - undoable - history_tokens(ratio))
    count = position - start
    yield FilledRows(f"{name}.ring.kv", part.ring.kv, start, count, in_ring=True)
    yield FilledRows(f"{name}.ring.score", part.ring.score, start, count, in_ring=True)


def _rows(
    name: str, cache: RowCache, start: int, end: int, *, in_ring: bool
) -> Iterator[FilledRows]:
    yield FilledRows(f"{name}.data", cache.data, start, end - start, in_ring)
    if cache.block_scale is not None:
        yield FilledRows(f"{name}.block_scale", cache.block_scale, start, end - start, in_ring)
