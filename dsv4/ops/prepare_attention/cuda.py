"""Everything between a layer's projections and its attention on the GPU: one launch for a decode step."""

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache
from dsv4.config import CSA_RATIO, MAX_DECODE_TOKENS
from dsv4.launch.loader import Defines, Launch, prepare
from dsv4.ops.compressor.cuda import THREADS, check_compression, compress, row_format, split
from dsv4.ops.indexer.cuda import check_index_queries, index_query
from dsv4.ops.kv_write.cuda import check_key_rows, in_vectors, keys_in_vectors, kv_write
from dsv4.ops.prepare_attention import Compression, Parts, Queries, QueryKeyNorm
from dsv4.ops.prepare_attention import prepare_attention as prepare_in_parts
from dsv4.ops.remembered import layouts, remembered
from dsv4.ops.rope.cuda import check_queries, query_rope

CUDA_PARTS = Parts(query_rope, kv_write, compress, index_query)
_ROW_WARPS = 8


def prepare_attention(
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Queries:
    """``dsv4.ops.prepare_attention.prepare_attention`` in bfloat16: one launch for up to 8 tokens in the formats of a
    model, else the launches of its parts, one after the other; the same bits either way.

    Raises ``ValueError`` for another dtype, shape or device, as the parts do.
    """
    if kv_TD.shape[0] <= MAX_DECODE_TOKENS:
        q_THD, index_TID = queries
        queries = Queries(q_THD.contiguous(), None if index_TID is None else index_TID.contiguous())
        inputs: list[Tensor] = [kv_TD.contiguous()]
        parts: list[object] = [norm]
        for compression in compressions:
            inputs += (compression.kv_TW.contiguous(), compression.score_TW.contiguous())
            parts += (compression.weights, compression.state)
        read = [tensor for tensor in (positions_T, *queries, *inputs) if tensor is not None]
        arguments = (queries, inputs[0], positions_T, norm, ring, compressions)
        launch = remembered(ring, tuple(parts), layouts(*read), _prepare, *arguments)
        if launch is not None:
            return _start(launch, positions_T, queries, inputs)
    return prepare_in_parts(queries, kv_TD, positions_T, norm, ring, compressions, CUDA_PARTS)


def _start(launch: Launch, positions_T: Tensor, queries: Queries, inputs: list[Tensor]) -> Queries:
    """``inputs``: kv and the compressors' products."""
    q_THD, index_TID = queries
    rotated_THD = torch.empty_like(q_THD)
    if index_TID is None:
        launch(positions_T, q_THD, rotated_THD, *inputs)
        return Queries(rotated_THD, None)
    rotated_TID = torch.empty_like(index_TID)
    launch(positions_T, q_THD, rotated_THD, index_TID, rotated_TID, *inputs)
    return Queries(rotated_THD, rotated_TID)


def _prepare(
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Launch | None:
    """The launch, called with the tensors that differ from step to step; None where it takes several."""
    if not _in_one_launch(queries, kv_TD, norm, ring, compressions):
        return None
    _check(queries, kv_TD, positions_T, norm, ring, compressions)
    tokens, heads, _ = queries.q_THD.shape
    index_heads, index_width = (0, 0) if queries.index_TID is None else queries.index_TID.shape[1:]
    index = None if queries.index_TID is None else Tensor
    main, keys = (*compressions, None, None)[:2]
    window_blocks = 0 if main is None else split(main.weights, main.state.rows)[0]
    row_blocks = -(-(1 + heads + index_heads) // _ROW_WARPS)
    cluster = max(1, window_blocks)
    clusters = -(-(window_blocks + (keys is not None) + row_blocks) // cluster)
    return prepare(
        "prepare_attention",
        "prepare_attention",
        (clusters * cluster, tokens),
        THREADS if compressions else 32 * _ROW_WARPS,
        *(Tensor, norm.inv_freq),
        *(Tensor, Tensor, heads),
        *(index, index, index_heads),
        *(Tensor, norm.kv_norm, ring.data, ring.block_scale, ring.slots),
        *_window_arguments(main),
        *_window_arguments(keys),
        float(norm.eps),
        float(index_width**-0.5) if index_width else 1.0,
        device=queries.q_THD.device,
        cluster=cluster if cluster > 1 else None,
        defines=kernel_defines(norm, ring, compressions),
    )


def _window_arguments(compression: Compression | None) -> tuple[Tensor | type | int | None, ...]:
    if compression is None:
        return *[None] * 8, 0, 0
    weights, ring, rows = compression.weights, compression.state.ring, compression.state.rows
    stores = weights.ape, weights.norm, ring.kv, ring.score, rows.data, rows.block_scale
    return Tensor, Tensor, *stores, rows.slots, ring.kv.shape[0]


def kernel_defines(norm: QueryKeyNorm, ring: RowCache, compressions: tuple[Compression, ...]) -> Defines:
    """What the kernel is compiled with: the geometry and the formats of a layer."""
    main, keys = (*compressions, None, None)[:2]
    ratio, blocks, groups, index_width, index_format, index_groups = 0, 1, 1, 0, 0, 1
    if main is not None:
        ratio, (blocks, groups) = main.weights.ratio, split(main.weights, main.state.rows)
    if keys is not None:
        index_width, index_format = keys.state.rows.width, row_format(keys.state.rows)
        _, index_groups = split(keys.weights, keys.state.rows)
    return (
        ("WIDTH", ring.width),
        ("ROPE", 2 * norm.inv_freq.shape[0]),
        ("KEY_FORMAT", row_format(ring)),
        ("RATIO", ratio),
        ("BLOCKS", blocks),
        ("GROUPS", groups),
        ("INDEX_WIDTH", index_width),
        ("INDEX_FORMAT", index_format),
        ("INDEX_GROUPS", index_groups),
        ("ROW_WARPS", _ROW_WARPS),
    )


def _in_one_launch(
    queries: Queries, kv_TD: Tensor, norm: QueryKeyNorm, ring: RowCache, compressions: tuple[Compression, ...]
) -> bool:
    """Whether the kernel knows this geometry: rows in vectors, everything of a layer in the same formats."""
    rope_width = 2 * norm.inv_freq.shape[0]
    if not 1 <= kv_TD.shape[0] <= MAX_DECODE_TOKENS or not in_vectors(queries.q_THD, rope_width):
        return False
    if norm.kv_norm.dtype != torch.float32 or not keys_in_vectors(kv_TD, norm.kv_norm, ring):
        return False
    if queries.q_THD.shape[-1] != ring.width or len(compressions) > 2:
        return False
    if (queries.index_TID is not None) != (len(compressions) == 2):
        return False
    return all(
        _is_usual(compression, norm, ring, queries.index_TID if index else None)
        for index, compression in enumerate(compressions)
    )


def _is_usual(compression: Compression, norm: QueryKeyNorm, ring: RowCache, index_TID: Tensor | None) -> bool:
    """The main compressor pools rows like the ring's, the indexer's (if there are index queries) rows like theirs."""
    weights, rows = compression.weights, compression.state.rows
    if weights.inv_freq.data_ptr() != norm.inv_freq.data_ptr() or weights.norm_eps != norm.eps:
        return False
    if weights.compute_dtype != torch.bfloat16 or weights.rotate_keys != (index_TID is not None):
        return False
    if index_TID is not None:
        return weights.ratio == CSA_RATIO and rows.width == index_TID.shape[-1]
    return rows.width == ring.width and rows.format is ring.format and rows.data.dtype == ring.data.dtype


def _check(
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> None:
    check_queries(queries.q_THD, positions_T, norm.inv_freq)
    check_key_rows(kv_TD, norm.kv_norm, positions_T, norm.inv_freq, ring)
    for part in compressions:
        check_compression(part.kv_TW, part.score_TW, positions_T, part.weights, part.state)
    if queries.index_TID is not None:
        check_index_queries(queries.index_TID, positions_T, norm.inv_freq)
