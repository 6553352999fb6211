"""Window key rows on the GPU: norm, rotation, quantisation and the store in one launch."""

import torch
from torch import Tensor

from dsv4.cache_rows import KV_GROUP, RowCache, RowFormat
from dsv4.config import MAX_DECODE_TOKENS
from dsv4.launch.loader import launch
from dsv4.ops.attention.decode import check_rows, expect

_ANY_THREADS, _WARPS, _VECTOR, _MOST_VECTOR_WIDTH, _WIDEST_ROW = 256, 8, 8, 1024, 4096
# Formats of kv_rows.cuh by the dtype of the rows.
_FORMATS = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}


def kv_write(
    kv_TD: Tensor, norm_weight: Tensor, positions_T: Tensor, inv_freq: Tensor, ring: RowCache, eps: float
) -> None:
    """``dsv4.ops.kv_write.kv_write`` for bfloat16 kv ``[T, D]``, D up to 4096, into KV_FP8 or PLAIN rows.

    The row is rounded to bfloat16 after the norm and after the rotation. Strided kv is made contiguous first; a norm
    weight that is not float32 is converted in a launch of its own. Raises ``ValueError`` for another dtype, shape or
    device.
    """
    norm_weight = norm_weight.float().contiguous()
    check_key_rows(kv_TD, norm_weight, positions_T, inv_freq, ring)
    kv_TD = kv_TD.contiguous()
    tokens, width = kv_TD.shape
    if tokens == 0:
        return
    # A warp alone has the shorter latency, a block the higher throughput.
    if tokens <= MAX_DECODE_TOKENS and keys_in_vectors(kv_TD, norm_weight, ring):
        launch_rows(None, positions_T, inv_freq, eps, (kv_TD, norm_weight, ring))
        return
    launch(
        "kv_write",
        "kv_write",
        tokens,
        _ANY_THREADS,
        kv_TD,
        norm_weight,
        positions_T,
        inv_freq,
        ring.data,
        ring.block_scale,
        _FORMATS[ring.data.dtype],
        width,
        ring.rope_width,
        ring.slots,
        float(eps),
        device=kv_TD.device,
    )


def launch_rows(
    q_THD: Tensor | None,
    positions_T: Tensor,
    inv_freq: Tensor,
    eps: float,
    keys: tuple[Tensor, Tensor, RowCache] | None,
) -> Tensor | None:
    """``query_rope.cu``: the rotated queries of ``q_THD`` and, of ``keys`` (kv, norm weight, ring), the key rows; one
    of the two may be None. Everything contiguous, checked, and in vectors (below).
    """
    kv_TD, norm_weight, ring = keys or (None, None, None)
    some = kv_TD if q_THD is None else q_THD
    assert some is not None
    heads = 0 if q_THD is None else q_THD.shape[1]
    out_THD = None if q_THD is None else torch.empty_like(q_THD)
    tokens, width, rows = some.shape[0], some.shape[-1], heads + (keys is not None)
    # Few tokens: a warp per row. Many: a block walks all rows of a token, which share one rotation.
    rows_per_block = _WARPS if tokens <= MAX_DECODE_TOKENS else rows
    launch(
        "query_rope",
        "query_rope",
        (-(-rows // rows_per_block), tokens),
        32 * min(_WARPS, rows),
        q_THD,
        positions_T,
        inv_freq,
        out_THD,
        kv_TD,
        norm_weight,
        None if ring is None else ring.data,
        None if ring is None else ring.block_scale,
        0 if ring is None else _FORMATS[ring.data.dtype],
        1 if ring is None else ring.slots,
        heads,
        rows_per_block,
        float(eps),
        device=some.device,
        defines=(("WIDTH", width), ("ROPE", 2 * inv_freq.shape[0])),
    )
    return out_THD


def in_vectors(rows: Tensor, rope_width: int) -> bool:
    """Whether rows ``[..., D]`` can be read 16 bytes at a time, as ``launch_rows`` does."""
    whole = rows.shape[-1] % _VECTOR == 0 and rope_width % _VECTOR == 0
    return whole and rows.shape[-1] <= _MOST_VECTOR_WIDTH and rows.data_ptr() % 16 == 0


def keys_in_vectors(kv_TD: Tensor, norm_weight: Tensor, ring: RowCache) -> bool:
    """Whether ``launch_rows`` takes these key rows."""
    grouped = ring.format is RowFormat.PLAIN or (ring.width - ring.rope_width) % KV_GROUP == 0
    aligned = norm_weight.data_ptr() % 16 == 0 and ring.data.data_ptr() % 16 == 0
    return grouped and aligned and in_vectors(kv_TD, ring.rope_width)


def check_key_rows(kv_TD: Tensor, norm_weight: Tensor, positions_T: Tensor, inv_freq: Tensor, ring: RowCache) -> None:
    """Raises ``ValueError`` unless ``kv_write`` takes these."""
    if kv_TD.dtype != torch.bfloat16:
        raise ValueError(f"kv_TD: found {kv_TD.dtype}, expected torch.bfloat16")
    if kv_TD.dim() != 2 or kv_TD.shape[1] != ring.width or ring.width > _WIDEST_ROW:
        raise ValueError(f"kv_TD: found {list(kv_TD.shape)}, expected [T, {ring.width}], at most {_WIDEST_ROW} wide")
    tokens, width = kv_TD.shape
    if tokens > ring.slots:
        raise ValueError(f"kv_TD: found {tokens} tokens, expected at most the ring's {ring.slots}")
    expect("norm_weight", norm_weight, torch.float32, (width,), kv_TD.device)
    expect("positions_T", positions_T, torch.int64, (tokens,), kv_TD.device)
    expect("inv_freq", inv_freq, torch.float32, (ring.rope_width // 2,), kv_TD.device)
    check_rows("ring", ring, kv_TD.device)
