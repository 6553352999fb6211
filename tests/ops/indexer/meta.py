"""Index queries, head weights and keys without memory, for recordings that nothing runs."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat
from tests.ops.recorded import meta

WIDTH = 128
ROPE = 64


class Arguments(NamedTuple):
    """Of ``index_select``."""

    q_TID: Tensor
    weight_TI: Tensor
    score_scale: float
    keys: RowCache
    positions_T: Tensor
    index_topk: int


def selection(
    tokens: int,
    slots: int,
    heads: int = 64,
    format: RowFormat = RowFormat.INDEX_FP8,
    dtype: torch.dtype = torch.bfloat16,
) -> Arguments:
    """512 entries for each token; ``dtype``: of plain keys."""
    return Arguments(
        meta(tokens, heads, WIDTH),
        meta(tokens, heads, dtype=torch.float32),
        0.5,
        RowCache.allocate(slots, WIDTH, ROPE, format, dtype, torch.device("meta")),
        meta(tokens, dtype=torch.int64),
        512,
    )
