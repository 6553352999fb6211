"""Index selection of a long step, in tiles of tokens whose scores fit one piece of memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.items import ShapeOf
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.indexer.selection import SelectionShapes, checked_selection, record_selection

# Scores of one tile: 2,047 tokens at a context of 128k, 255 at one of 1M; a block takes about one
# token, so that all multiprocessors have work.
_SCORE_BYTES = 256 << 20


def index_select(
    recording: Recording,
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
) -> Tensor:
    """``dsv4.ops.indexer.index_select`` of 9 tokens and more, with the results of ``decode``.

    The scores take at most 256 MB: longer steps are cut into tiles of tokens, one after the other.
    """
    selection = checked_selection(q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
    shapes = SelectionShapes(recording, selection)
    tokens = q_TID.shape[0]
    stride = selection.score_stride
    tile = min(tokens, max(1, _SCORE_BYTES // (torch.int32.itemsize * stride)))
    score_TS = recording.empty((tile, stride), torch.int32)
    selected_TK = recording.empty((tokens, selection.selected), torch.int64)
    for start in range(0, tokens, tile):
        count = min(tile, tokens - start)
        launched = (
            _of_tile(start, count, shapes.prefill_scores, shapes.decode_scores),
            _of_tile(start, count, shapes.prefill_top_k, shapes.decode_top_k),
        )
        part_TK = selected_TK.narrow(0, start, count)
        record_selection(recording, selection.tile(start, count), launched, score_TS, part_TK)
    return selected_TK


def _of_tile(
    start: int, count: int, many: Callable[[int], Shape], few: Callable[[int], Shape]
) -> ShapeOf:
    """The shape for a step's tokens in this tile; a few are launched as in a decode step."""

    def shape(tokens: int) -> Shape | None:
        here = min(tokens - start, count)
        if here <= 0:
            return None
        return many(here) if here > MAX_DECODE_TOKENS else few(here)

    return shape
