"""Lightning indexer on the GPU: queries rotated in one launch, entries scored and selected in one launch each."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat, row_shapes
from dsv4.config import MAX_DECODE_TOKENS
from dsv4.launch.loader import Launch, launch, multiprocessors, prepare
from dsv4.ops.attention.decode import expect
from dsv4.ops.remembered import layouts, remembered

_WARPS = 8
# The tensor core kernel: width of a row, heads at once, keys of a tile, stages of a warp's ring.
_WIDTH, _HEAD_TILE, _MOST_HEADS, _TILE_KEYS, _STAGES = 128, 8, 64, 16, 4
_SHARE_KEYS = 1024
_ANY_FORMATS = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}
_MOST_SHARED_BYTES = 227 << 10
_SCORE_BYTES = 256 << 20
_CLUSTER, _SPREAD = 8, 16384
# (threads, loads in a row) of a selecting block: in a cluster, alone for a decode step, and one of many tokens.
_CLUSTER_BLOCK, _DECODE_BLOCK, _PREFILL_BLOCK, _KEPT = (1024, 4), (512, 8), (256, 8), 512


def index_query(q_TID: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """``dsv4.ops.indexer.index_query`` for bfloat16 q ``[T, I, D]``, rounded after each of the two rotations.

    Strided q is made contiguous first. Raises ``ValueError`` for another dtype, shape or device.
    """
    check_index_queries(q_TID, positions_T, inv_freq)
    tokens, heads, width = q_TID.shape
    q_TID = q_TID.contiguous()
    out_TID = torch.empty_like(q_TID)
    if q_TID.numel() == 0:
        return out_TID
    # Few tokens: a warp per head. Many: a block walks all heads of a token, which share one rotation.
    heads_per_block = 2 if tokens <= MAX_DECODE_TOKENS else heads
    launch(
        "index_query",
        "index_query",
        (-(-heads // heads_per_block), tokens),
        32 * min(_WARPS, heads_per_block),
        q_TID,
        positions_T,
        inv_freq,
        out_TID,
        heads,
        heads_per_block,
        float(width**-0.5),
        device=q_TID.device,
        defines=(("WIDTH", width), ("ROPE", 2 * inv_freq.shape[0])),
    )
    return out_TID


def index_select(
    q_TID: Tensor, weight_TI: Tensor, score_scale: float, keys: RowCache, positions_T: Tensor, index_topk: int
) -> Tensor:
    """``dsv4.ops.indexer.index_select`` for bfloat16 q: the best entries in ascending order, then −1.

    A token that sees no more than K entries gets all of them, whatever their scores. The scores of a call take at
    most 256 MB: longer steps are cut into tiles of tokens. Rows of 128 values in 8 to 64 heads (a multiple of 8) of
    bfloat16 or fp8 keys take tensor cores; other shapes a slower kernel. Raises ``ValueError`` for another dtype,
    shape or device.
    """
    q_TID = q_TID.contiguous()
    weight_TI = weight_TI if weight_TI.stride(-1) == 1 else weight_TI.contiguous()
    tokens, arguments = q_TID.shape[0], (q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
    if tokens * keys.slots == 0:
        _check(*arguments)
        return torch.empty((tokens, min(index_topk, keys.slots)), dtype=torch.int64, device=q_TID.device)
    tile = max(1, _SCORE_BYTES // (4 * _score_stride(keys)))
    if tile < tokens:
        parts = zip(q_TID.split(tile), weight_TI.split(tile), positions_T.split(tile), strict=True)
        return torch.cat([index_select(q, weight, score_scale, keys, at, index_topk) for q, weight, at in parts])
    key = (score_scale, index_topk, layouts(q_TID, weight_TI, positions_T))
    return remembered(keys, (), key, _prepare, *arguments)(q_TID, weight_TI, positions_T)


class _Selection(NamedTuple):
    """Both launches and the shapes of the scores and of the result."""

    score: Launch
    select: Launch
    scores: tuple[int, int]
    selected: tuple[int, int]

    def __call__(self, q_TID: Tensor, weight_TI: Tensor, positions_T: Tensor) -> Tensor:
        score_TS = torch.empty(self.scores, dtype=torch.int32, device=q_TID.device)
        selected_TK = torch.empty(self.selected, dtype=torch.int64, device=q_TID.device)
        self.score(q_TID, weight_TI, positions_T, score_TS)
        self.select(score_TS, positions_T, selected_TK)
        return selected_TK


def _prepare(
    q_TID: Tensor, weight_TI: Tensor, score_scale: float, keys: RowCache, positions_T: Tensor, index_topk: int
) -> _Selection:
    _check(q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
    tokens, selected = q_TID.shape[0], min(index_topk, keys.slots)
    score = _prepare_score(q_TID, weight_TI, score_scale, keys, selected)
    select = _prepare_select(tokens, keys, selected, q_TID.device)
    return _Selection(score, select, (tokens, _score_stride(keys)), (tokens, selected))


def _score_stride(keys: RowCache) -> int:
    """Scores from one token to the next."""
    return -(-keys.slots // 4) * 4


def _prepare_score(q_TID: Tensor, weight_TI: Tensor, score_scale: float, keys: RowCache, selected: int) -> Launch:
    """The launch that takes queries, head weights, positions and memory for the scores."""
    (tokens, heads, width), device = q_TID.shape, q_TID.device
    operands = (Tensor, Tensor, float(score_scale), keys.data, keys.block_scale, Tensor, Tensor)
    sizes = (keys.slots, _score_stride(keys), weight_TI.stride(0))
    blocks = multiprocessors(device)
    tensor_cores = width == _WIDTH and heads % _HEAD_TILE == 0 and heads <= _MOST_HEADS
    if not tensor_cores or keys.data.dtype == torch.float32 or q_TID.data_ptr() % 16 or keys.data.data_ptr() % 16:
        return prepare(
            *("index_scores", "index_scores_any", (max(1, 2 * blocks // tokens), tokens), 32 * _WARPS),
            *operands,
            *sizes,
            *(selected, heads, width, _ANY_FORMATS[keys.data.dtype]),
            device=device,
            shared_bytes=4 * heads * (width + 1),
        )
    # Few tokens: all blocks share the entries of each. Many: a block takes all entries of a token, or a large share.
    decode = tokens <= MAX_DECODE_TOKENS
    parts = max(1, (blocks if decode else 4 * blocks) // tokens)
    return prepare(
        *("index_scores", "index_scores", min(blocks, tokens * parts), 32 * _WARPS),
        *operands,
        *sizes,
        *(tokens, selected, parts, 1 if decode else _SHARE_KEYS // _TILE_KEYS),
        device=device,
        shared_bytes=_score_shared_bytes(heads, keys.data.element_size()),
        defines=(("HEADS", heads), ("FP8", int(keys.format is RowFormat.INDEX_FP8))),
    )


def _score_shared_bytes(heads: int, key_bytes: int) -> int:
    """``sizeof(Shared)`` of index_scores.cu: queries twice, factors, and the warps' rings of keys and scales."""
    ring = _WARPS * _STAGES * _TILE_KEYS * (_WIDTH * key_bytes + 4)
    return 2 * 2 * heads * _WIDTH + 4 * heads + ring


def _prepare_select(tokens: int, keys: RowCache, selected: int, device: torch.device) -> Launch:
    """The launch that takes scores, positions and memory for the selected entries."""
    decode = tokens <= MAX_DECODE_TOKENS
    cluster = _CLUSTER if decode and keys.slots > _SPREAD else 1
    threads, strips = _CLUSTER_BLOCK if cluster > 1 else _DECODE_BLOCK if decode else _PREFILL_BLOCK
    shared_bytes = _select_shared_bytes(cluster, threads)
    return prepare(
        *("top_k", "top_k_tokens", cluster * tokens, threads),
        *(Tensor, Tensor, Tensor),
        *(keys.slots, _score_stride(keys), selected),
        device=device,
        shared_bytes=shared_bytes,
        cluster=cluster if cluster > 1 else None,
        defines=(
            ("CLUSTER", cluster),
            ("THREADS", threads),
            ("STRIPS", strips),
            ("KEPT", _KEPT),
            ("SPREAD", _SPREAD),
            ("SHARED_BYTES", shared_bytes),
        ),
    )


def _select_shared_bytes(cluster: int, threads: int, bins: int = 2048, digits: int = 7, few: int = 128) -> int:
    """At least ``sizeof(Shared)`` of top_k.cuh, which asserts it."""
    merged = (digits * bins // cluster + bins) if cluster > 1 else digits + 1
    warps = threads // 32
    return 4 * (2 * bins + merged + 3 * few + 2 * warps + 16 + 2 * warps * _KEPT)


def check_index_queries(q_TID: Tensor, positions_T: Tensor, inv_freq: Tensor) -> None:
    """Raises ``ValueError`` unless ``index_query`` takes these."""
    _check_queries(q_TID)
    tokens, _, width = q_TID.shape
    rotary = inv_freq.shape[0]
    if width & (width - 1) or 2 * rotary > width:
        raise ValueError(f"q_TID: found rows of {width}, expected a power of two of at least {2 * rotary}")
    expect("positions_T", positions_T, torch.int64, (tokens,), q_TID.device)
    expect("inv_freq", inv_freq, torch.float32, (rotary,), q_TID.device)


def _check(
    q_TID: Tensor, weight_TI: Tensor, score_scale: float, keys: RowCache, positions_T: Tensor, index_topk: int
) -> None:
    _check_queries(q_TID)
    tokens, heads, _ = q_TID.shape
    device = q_TID.device
    if weight_TI.dtype != torch.float32 or weight_TI.shape != (tokens, heads) or weight_TI.device != device:
        found = f"{weight_TI.dtype} {list(weight_TI.shape)} on {weight_TI.device}"
        raise ValueError(f"weight_TI: found {found}, expected torch.float32 {[tokens, heads]} on {device}")
    expect("positions_T", positions_T, torch.int64, (tokens,), device)
    _check_keys(keys, q_TID)
    if index_topk < 1:
        raise ValueError(f"index_topk: found {index_topk}, expected at least 1")


def _check_queries(q_TID: Tensor) -> None:
    if q_TID.dtype != torch.bfloat16:
        raise ValueError(f"q_TID: found {q_TID.dtype}, expected torch.bfloat16")
    if q_TID.dim() != 3 or q_TID.device.type != "cuda":
        raise ValueError(f"q_TID: found {list(q_TID.shape)} on {q_TID.device}, expected [T, I, D] on a CUDA device")


def _check_keys(keys: RowCache, q_TID: Tensor) -> None:
    heads, width = q_TID.shape[1:]
    if keys.format is RowFormat.KV_FP8 or keys.width != width:
        found = f"{keys.format.value} rows of {keys.width}"
        raise ValueError(f"keys: found {found}, expected index_fp8 or plain rows of {width}")
    if keys.data.dtype not in _ANY_FORMATS:
        raise ValueError(f"keys: found {keys.data.dtype}, expected torch.bfloat16 or torch.float32")
    if 4 * heads * (width + 1) > _MOST_SHARED_BYTES:
        raise ValueError(f"q_TID: found {heads} heads of {width}, expected at most {_MOST_SHARED_BYTES // 4} values")
    data, scale = row_shapes(keys.width, keys.rope_width, keys.format, keys.data.dtype)
    expect("keys", keys.data, data[1], (keys.slots, data[0]), q_TID.device)
    if scale is not None and keys.block_scale is not None:
        expect("keys.block_scale", keys.block_scale, scale[1], (keys.slots, scale[0]), q_TID.device)
