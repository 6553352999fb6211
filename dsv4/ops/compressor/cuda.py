"""Compressor on the GPU: one launch for a decode step, a second one that stores the ring for longer steps."""

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat, row_shapes
from dsv4.config import CSA_RATIO, MAX_DECODE_TOKENS
from dsv4.launch.loader import Defines, launch
from dsv4.ops.attention.decode import expect
from dsv4.ops.compressor import CompressedState, CompressorWeights, history_tokens

THREADS, _RING_THREADS = 512, 256
_MOST_BLOCKS, _BLOCK_CHANNELS = 8, 64
_MOST_SHARED_BYTES = 48 << 10
# As in kv_rows.cuh.
_QUANTISED_FORMATS = {RowFormat.KV_FP8: 0, RowFormat.INDEX_FP8: 3}
_PLAIN_FORMATS = {torch.bfloat16: 1, torch.float32: 2}


def compress(
    kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: CompressorWeights, state: CompressedState
) -> None:
    """``dsv4.ops.compressor.compress``, whether a window is complete decided on the device.

    kv and score are float32 ``[T, W]`` and may be columns of wider tensors. The kernel pools a window the same way
    however its tokens were fed. Rows beyond the cache are dropped. Raises ``ValueError`` for another dtype, shape or
    device, and for a ring without room for the longest decode step.
    """
    ring, rows, ratio = state.ring, state.rows, weights.ratio
    check_compression(kv_TW, score_TW, positions_T, weights, state)
    tokens = kv_TW.shape[0]
    if tokens == 0:
        return
    kv_TW, score_TW = (part if part.stride(1) == 1 else part.contiguous() for part in (kv_TW, score_TW))
    blocks, groups = split(weights, rows)
    decode = tokens <= MAX_DECODE_TOKENS
    launch(
        "compressor",
        "compress",
        (blocks, tokens if decode else -(-tokens // ratio)),
        THREADS,
        kv_TW,
        score_TW,
        positions_T,
        weights.ape,
        weights.norm,
        weights.inv_freq,
        ring.kv,
        ring.score,
        rows.data,
        rows.block_scale,
        tokens,
        kv_TW.stride(0),
        score_TW.stride(0),
        ring.kv.shape[0],
        rows.slots,
        int(decode),
        int(weights.rotate_keys),
        int(weights.compute_dtype == torch.bfloat16),
        float(weights.norm_eps),
        float(rows.width**-0.5),
        device=kv_TW.device,
        shared_bytes=4 * (rows.width // blocks + (2 * THREADS if groups > 1 else 0)),
        cluster=blocks if blocks > 1 else None,
        defines=_defines(weights, rows),
    )
    if not decode:
        _store_ring(kv_TW, score_TW, positions_T, weights, state)


def _store_ring(
    kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: CompressorWeights, state: CompressedState
) -> None:
    """Windows of a step read what the ring held before it, so a step that is longer than the ring's reserve overwrites
    it only when all of them are done.
    """
    tokens, slots = kv_TW.shape[0], state.ring.kv.shape[0]
    launch(
        "compressor",
        "compress_ring",
        min(tokens, slots),
        _RING_THREADS,
        kv_TW,
        score_TW,
        positions_T,
        weights.ape,
        state.ring.kv,
        state.ring.score,
        tokens,
        kv_TW.stride(0),
        score_TW.stride(0),
        slots,
        device=kv_TW.device,
        defines=_defines(weights, state.rows),
    )


def row_format(rows: RowCache) -> int:
    """The number that kv_rows.cuh gives this format. Raises ``ValueError`` for a plain dtype it does not know."""
    if rows.format in _QUANTISED_FORMATS:
        return _QUANTISED_FORMATS[rows.format]
    if rows.data.dtype not in _PLAIN_FORMATS:
        raise ValueError(f"rows: found {rows.data.dtype}, expected torch.bfloat16 or torch.float32")
    return _PLAIN_FORMATS[rows.data.dtype]


def split(weights: CompressorWeights, rows: RowCache) -> tuple[int, int]:
    """(blocks that share the channels of a window, groups of threads that share its tokens)."""
    if weights.ratio == CSA_RATIO:
        return 1, 4 if rows.width <= THREADS // 4 else 1
    blocks, rest = divmod(rows.width, _BLOCK_CHANNELS)
    whole_row = weights.rotate_keys or rows.format is RowFormat.INDEX_FP8
    return (1 if rest or blocks > _MOST_BLOCKS or whole_row else blocks), 8


def _defines(weights: CompressorWeights, rows: RowCache) -> Defines:
    blocks, groups = split(weights, rows)
    return (
        ("RATIO", weights.ratio),
        ("GROUPS", groups),
        ("BLOCKS", blocks),
        ("WIDTH", rows.width),
        ("ROPE", 2 * weights.inv_freq.shape[0]),
        ("FORMAT", row_format(rows)),
    )


def check_compression(
    kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: CompressorWeights, state: CompressedState
) -> None:
    """Raises ``ValueError`` unless ``compress`` takes these."""
    ring, rows, ratio, device = state.ring, state.rows, weights.ratio, kv_TW.device
    columns = rows.width * (2 if ratio == CSA_RATIO else 1)
    for name, part in (("kv_TW", kv_TW), ("score_TW", score_TW)):
        if part.dtype != torch.float32:
            raise ValueError(f"{name}: found {part.dtype}, expected torch.float32")
        if part.dim() != 2 or part.shape != (kv_TW.shape[0], columns) or part.device != device:
            raise ValueError(f"{name}: found {list(part.shape)} on {part.device}, expected [T, {columns}] on {device}")
    if 4 * (rows.width + 2 * THREADS) > _MOST_SHARED_BYTES:
        raise ValueError(f"rows: found {rows.width} values, expected at most {_MOST_SHARED_BYTES // 4 - 2 * THREADS}")
    if weights.compute_dtype not in _PLAIN_FORMATS:
        raise ValueError(f"compute_dtype: found {weights.compute_dtype}, expected torch.bfloat16 or torch.float32")
    slots = ring.kv.shape[0]
    if slots < history_tokens(ratio) + MAX_DECODE_TOKENS:
        raise ValueError(f"ring: found {slots} slots, expected at least {history_tokens(ratio) + MAX_DECODE_TOKENS}")
    rotary = weights.inv_freq.shape[0]
    if 2 * rotary > rows.width:
        raise ValueError(f"inv_freq: found {rotary} frequencies, expected at most {rows.width // 2}")
    expect("positions_T", positions_T, torch.int64, (kv_TW.shape[0],), device)
    expect("ape", weights.ape, torch.float32, (ratio, columns), device)
    expect("norm", weights.norm, torch.float32, (rows.width,), device)
    expect("inv_freq", weights.inv_freq, torch.float32, (rotary,), device)
    expect("ring.kv", ring.kv, torch.float32, (slots, columns), device)
    expect("ring.score", ring.score, torch.float32, (slots, columns), device)
    data, scale = row_shapes(rows.width, rows.rope_width, rows.format, rows.data.dtype)
    expect("rows.data", rows.data, data[1], (rows.slots, data[0]), device)
    if scale is not None and rows.block_scale is not None:
        expect("rows.block_scale", rows.block_scale, scale[1], (rows.slots, scale[0]), device)
