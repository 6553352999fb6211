"""What attention of a step reads: rotated queries, window keys, and the compressed rows that these
tokens complete.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.caches.rows import RowCache
from dsv4.ops.compressor import CompressorWeights, compress
from dsv4.ops.indexer import index_query
from dsv4.ops.kv_write import kv_write
from dsv4.ops.rope import query_rope


class Queries(NamedTuple):
    """Attention's queries ``[T, H, D]`` and, in a CSA layer, the indexer's ``[T, I, D]``."""

    q_THD: Tensor
    index_TID: Tensor | None


@dataclass(frozen=True)
class QueryKeyNorm:
    """Norm and rotation of a layer's queries and window keys: ``kv_norm`` float32 ``[D]`` (queries
    have no weight), ``inv_freq`` float32 ``[R/2]``.
    """

    kv_norm: Tensor
    inv_freq: Tensor
    eps: float


@dataclass(frozen=True)
class Compression:
    """One compressor's part of a step: float32 products kv and score ``[T, W]``, its weights and
    its caches.
    """

    kv_TW: Tensor
    score_TW: Tensor
    weights: CompressorWeights
    state: CompressedState


def prepare_attention(
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Queries:
    """``query_rope`` and ``index_query`` of the queries, ``kv_write`` of kv ``[T, D]`` into
    ``ring``, and ``compress``.

    ``compressions``: none in a window-only layer, the main one in an HCA layer, the main one and
    the indexer's in a CSA layer. positions int64 ``[T]`` are consecutive. No part reads what
    another one writes.
    """
    q_THD = query_rope(queries.q_THD, positions_T, norm.inv_freq, norm.eps)
    kv_write(kv_TD, norm.kv_norm, positions_T, norm.inv_freq, ring, norm.eps)
    for part in compressions:
        compress(part.kv_TW, part.score_TW, positions_T, part.weights, part.state)
    if queries.index_TID is None:
        return Queries(q_THD, None)
    return Queries(q_THD, index_query(queries.index_TID, positions_T, norm.inv_freq))
