"""Lightning indexer: scores visible compressed entries and selects the best (model.md#indexer)."""

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat, pack_index_rows, unpack_index_rows
from dsv4.config import CSA_RATIO
from dsv4.ops.hadamard import hadamard
from dsv4.ops.nan import note_nan
from dsv4.ops.rope import rope

# Bytes of the scores that the torch op holds at once.
_TILE_BYTES = 64 << 20


def index_query(q_TID: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """Index queries ``[T, I, D]`` rotated twice: rotary embedding of the last R, then Hadamard."""
    return hadamard(rope(q_TID, positions_T, inv_freq))


def index_select(
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
    nan_1: Tensor | None = None,
) -> Tensor:
    """The best compressed entries of each token: int64 ``[T, K]``, −1 where fewer are visible.

    score(t, s) = Σ_i relu(q_ti · k_s) · w_ti · ``score_scale`` in float32, over entries
    s < (position + 1) // 4; w is float32 ``[T, I]`` and may be negative; the relu is per head. K =
    min(index_topk, slots of ``keys``). Ties: the lowest entry wins. With fp8 keys the queries are
    rounded to fp8 rows as well. The order of the list has no meaning. NaN scores sort first, and
    set int32 ``nan_1`` ``[1]`` to 1.
    """
    rows_SD = keys.read_all()
    queries = _rounded_queries(q_TID, keys)
    weight_TI = weight_TI.float() * score_scale
    entry = torch.arange(keys.slots, device=positions_T.device)
    tile = max(1, _TILE_BYTES // (4 * q_TID.shape[1] * keys.slots))
    selected = []
    for q, weight, position in zip(
        queries.split(tile), weight_TI.split(tile), positions_T.split(tile), strict=True
    ):
        score = (torch.relu(q @ rows_SD.T) * weight.unsqueeze(-1)).sum(1)
        score = score.masked_fill(entry >= ((position + 1) // CSA_RATIO)[:, None], -torch.inf)
        note_nan(nan_1, score)
        best, index = score.sort(dim=-1, descending=True, stable=True)
        selected.append(torch.where(best == -torch.inf, -1, index)[:, :index_topk])
    return torch.cat(selected)


def ascending_entries(selected_TK: Tensor) -> Tensor:
    """The entries that ``index_select`` lists, int64 ``[T, K]``: ascending, then −1 for none."""
    none = torch.iinfo(torch.int64).max
    ordered_TK = selected_TK.masked_fill(selected_TK < 0, none).sort(-1).values
    return ordered_TK.masked_fill(ordered_TK == none, -1)


def entry_scores(
    q_TID: Tensor, weight_TI: Tensor, score_scale: float, keys: RowCache, entries_TK: Tensor
) -> Tensor:
    """The scores by which ``index_select`` chooses, of the entries int64 ``[T, K]``: float32 ``[T,
    K]``, −inf for −1.
    """
    queries = _rounded_queries(q_TID, keys)
    weight_TI = weight_TI.float() * score_scale
    tile = max(1, _TILE_BYTES // (4 * entries_TK.shape[1] * (keys.width + q_TID.shape[1])))
    scores = []
    for q, weight, entries in zip(
        queries.split(tile), weight_TI.split(tile), entries_TK.split(tile), strict=True
    ):
        rows_TKD = keys.read(entries.clamp(0, keys.slots - 1))
        score = (torch.relu(q @ rows_TKD.transpose(1, 2)) * weight.unsqueeze(-1)).sum(1)
        scores.append(score.masked_fill(entries < 0, -torch.inf))
    return torch.cat(scores)


def _rounded_queries(q_TID: Tensor, keys: RowCache) -> Tensor:
    """float32, in the precision of the keys."""
    if keys.format is RowFormat.INDEX_FP8:
        return unpack_index_rows(*pack_index_rows(q_TID.float()))
    return q_TID.float()
