"""Index keys with values, in the memory of the CPU."""

import torch

from dsv4.caches.rows import RowCache, RowFormat
from tests.ops.cases import normal
from tests.ops.indexer.meta import ROPE, WIDTH


def drawn_keys(slots: int, format: RowFormat = RowFormat.INDEX_FP8) -> RowCache:
    """Every slot is written."""
    keys = RowCache.allocate(slots, WIDTH, ROPE, format, torch.bfloat16, torch.device("cpu"))
    keys.write(torch.arange(slots), normal(slots, WIDTH, seed=3))
    return keys
