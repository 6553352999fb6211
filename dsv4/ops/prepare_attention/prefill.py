"""Everything between a layer's projections and its attention for 9 and more tokens: the launches of
its parts.
"""

from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.recording import Recording
from dsv4.ops.compressor.prefill import compress
from dsv4.ops.indexer.query import index_query
from dsv4.ops.kv_write.prefill import kv_write
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.rope.cuda import query_rope


def prepare_attention(
    recording: Recording,
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Queries:
    """``dsv4.ops.prepare_attention.prepare_attention`` in bfloat16, in any geometry.

    Raises ``ValueError`` for another dtype, shape or layout, as the parts do.
    """
    q_THD = query_rope(recording, queries.q_THD, positions_T, norm.inv_freq, norm.eps)
    kv_write(recording, kv_TD, norm.kv_norm, positions_T, norm.inv_freq, ring, norm.eps)
    for part in compressions:
        compress(recording, part.kv_TW, part.score_TW, positions_T, part.weights, part.state)
    if queries.index_TID is None:
        return Queries(q_THD, None)
    return Queries(q_THD, index_query(recording, queries.index_TID, positions_T, norm.inv_freq))
