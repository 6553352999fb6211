"""Op tables whose ``prepare_attention`` has one part replaced: what faults and stand-ins are put in
with.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.ops import TORCH, Ops
from dsv4.ops.compressor import compress
from dsv4.ops.indexer import index_query
from dsv4.ops.kv_write import kv_write
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.rope import query_rope


class Parts(NamedTuple):
    """The functions that ``prepare_attention`` consists of."""

    query_rope: Callable[..., Tensor] = query_rope
    kv_write: Callable[..., None] = kv_write
    compress: Callable[..., None] = compress
    index_query: Callable[..., Tensor] = index_query


def with_parts(ops: Ops = TORCH, **replaced: Callable[..., Any]) -> Ops:
    """``ops`` with the torch ``prepare_attention``, the named parts of it replaced."""
    parts = Parts(**replaced)

    def prepare_attention(
        queries: Queries,
        kv_TD: Tensor,
        positions_T: Tensor,
        norm: QueryKeyNorm,
        ring: RowCache,
        compressions: tuple[Compression, ...],
    ) -> Queries:
        inv_freq = norm.inv_freq
        q_THD = parts.query_rope(queries.q_THD, positions_T, inv_freq, norm.eps)
        parts.kv_write(kv_TD, norm.kv_norm, positions_T, inv_freq, ring, norm.eps)
        for part in compressions:
            parts.compress(part.kv_TW, part.score_TW, positions_T, part.weights, part.state)
        if queries.index_TID is None:
            return Queries(q_THD, None)
        return Queries(q_THD, parts.index_query(queries.index_TID, positions_T, inv_freq))

    return dataclasses.replace(ops, prepare_attention=prepare_attention)
