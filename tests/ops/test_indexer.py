"""Lightning indexer: query rotation, scores, causal visibility, padding, ties."""

import pytest
import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.ops import Ops
from tests.ops.cases import integers, positions

WIDTH, ROPE = 128, 64


def key_cache(rows_SD: Tensor, format: RowFormat = RowFormat.PLAIN) -> RowCache:
    cache = RowCache.allocate(rows_SD.shape[0], WIDTH, ROPE, format, torch.float32, torch.get_default_device())
    cache.write(torch.arange(rows_SD.shape[0]), rows_SD)
    return cache


def exact_selection(q_ID: Tensor, weight_I: Tensor, rows_SD: Tensor, position: int, topk: int) -> set[int]:
    scores = []
    for entry in range(min((position + 1) // 4, rows_SD.shape[0])):
        products = q_ID.double() @ rows_SD[entry].double()
        total = sum(max(float(p), 0.0) * float(w) for p, w in zip(products, weight_I, strict=True))
        scores.append((-total, entry))
    return {entry for _, entry in sorted(scores)[:topk]}


@pytest.mark.parametrize("topk", [1, 5, 64])
def test_selects_the_best_visible_entries(ops: Ops, topk: int) -> None:
    """Whole numbers make the scores exact, negative weights and ties included."""
    position_T = positions(0, 2, 3, 4, 6, 7, 8, 30, 79, 99, 159)
    q_TID = integers(-2, 2, 11, 4, WIDTH, seed=1)
    weight_TI, rows_SD = integers(-3, 3, 11, 4, seed=2), integers(-1, 1, 40, WIDTH, seed=3)
    selected_TK = ops.index_select(q_TID, weight_TI, key_cache(rows_SD), position_T, topk)
    assert selected_TK.dtype == torch.int64
    assert selected_TK.shape == (11, min(topk, 40))
    for t, position in enumerate(position_T.tolist()):
        found = [entry for entry in selected_TK[t].tolist() if entry >= 0]
        assert len(found) == len(set(found)) == min(topk, (position + 1) // 4)
        assert set(found) == exact_selection(q_TID[t], weight_TI[t], rows_SD, position, topk)
        assert bool((selected_TK[t] >= -1).all())
