"""Index selection of a decode step: all multiprocessors score the entries of each token."""

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO
from dsv4.launch.recording import Recording
from dsv4.ops.indexer.selection import checked_selection, record_selection
from dsv4.ops.indexer.selection_shapes import SelectionShapes


def index_select(
    recording: Recording,
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
) -> Tensor:
    """``dsv4.ops.indexer.index_select`` of 1 to 8 tokens for bfloat16 q: int64 ``[T, K]``.

    The best entries in ascending order, then −1. A token that sees no more than K entries gets all
    of them, whatever their scores. Rows of 128 values in 8 to 64 heads (a multiple of 8) of
    bfloat16 or fp8 keys take tensor cores, other shapes a slower kernel. Raises ``ValueError`` for
    another dtype, shape or layout.
    """
    selection = checked_selection(q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
    shapes = SelectionShapes.of(recording, selection)
    tokens = q_TID.shape[0]
    score_TS = recording.empty((tokens, selection.score_stride), torch.int32)
    selected_TK = recording.empty((tokens, selection.selected), torch.int64)
    launched = shapes.decode_scores(tokens), shapes.decode_top_k(tokens)
    record_selection(recording, selection, launched, score_TS, selected_TK)
    recording.choose(selected_TK, CSA_RATIO * (selection.selected + 1) - 1)
    return selected_TK
