"""Launcher of the prefill attention kernels: many tokens, 64 heads of one token per block."""

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.launch import loader
from dsv4.ops.attention import KeySet

_HEADS_PER_BLOCK, _TILE_KEYS = 64, 64
_THREADS = {"attention_prefill": 256, "attention_prefill_sm90": 384}
_DECODE_THREADS = 256
_DECODE_BLOCKS_PER_SM = 8
# Besides queries and two tiles of keys: exchange, statistics, alignment (the offsets at the top of the two sources).
_OTHER_SHARED_BYTES = {"attention_prefill": 16384 + 1664 + 1024, "attention_prefill_sm90": 24576 + 1024 + 1024}


def attention_prefill(
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    portable: bool = False,
) -> Tensor:
    """``sparse_attention`` of ``dsv4.ops.attention`` for many tokens: bfloat16 ``[T, H, D]``.

    q bfloat16; caches KV_FP8 or PLAIN bfloat16; ``selected_TK`` int64 or None, any number of entries per token, each
    complete for the last token of the step (s < (positions[-1] + 1) // ratio), −1 anywhere; sink float32 ``[H]``;
    positions int64, consecutive; inv_freq float32 ``[R/2]``. D is a multiple of 64 up to 512, R of 8 up to 64.

    Products bfloat16 × bfloat16 with float32 sums; weights are rounded to bfloat16 before the value product, the
    denominator is not. The result is rounded before and after the rotation. Same bits on every call. fp8 caches are
    decoded into a bfloat16 copy first, so a call needs 2·D bytes per slot of both caches meanwhile. No tokens: empty.
    ``portable`` takes the mma.sync kernel on GPUs that have wgmma too. Raises ``ValueError`` for anything else.
    """
    _check(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    q_THD = q_THD.contiguous()
    out_THD = torch.empty_like(q_THD)
    tokens, heads, width = q_THD.shape
    if tokens == 0 or heads == 0:
        return out_THD
    compressed = keys.compressed
    if selected_TK is not None and selected_TK.shape[1] == 0:
        compressed = selected_TK = None
    ring_SD, compressed_CD = _plain_rows(keys, compressed, positions_T)
    device, units = q_THD.device, tokens * -(-heads // _HEADS_PER_BLOCK)
    kernel, blocks = "attention_prefill", units
    if not portable and width == 512 and loader.architecture_of(device.index or 0) == "sm_90a":
        kernel, blocks = "attention_prefill_sm90", min(units, loader.multiprocessors(device))
    loader.launch(
        kernel,
        kernel,
        blocks,
        _THREADS[kernel],
        *(q_THD, ring_SD, compressed_CD, selected_TK, sink_H, positions_T, inv_freq, out_THD),
        *(tokens, heads, keys.ring.slots, 0 if compressed is None else compressed.slots),
        *(0 if selected_TK is None else selected_TK.shape[1], max(keys.ratio, 1), keys.window, float(width**-0.5)),
        device=device,
        shared_bytes=(_HEADS_PER_BLOCK + 2 * _TILE_KEYS) * 2 * width + _OTHER_SHARED_BYTES[kernel],
        defines=_geometry(keys.ring),
    )
    return out_THD


def _plain_rows(keys: KeySet, compressed: RowCache | None, positions_T: Tensor) -> tuple[Tensor, Tensor | None]:
    """The caches as bfloat16 ``[S, D]``, slot by slot; of fp8 caches a copy of the rows that these tokens can see."""
    ring = keys.ring
    if ring.format is RowFormat.PLAIN:
        return ring.data, None if compressed is None else compressed.data
    ring_SD = torch.empty(ring.slots, ring.width, dtype=torch.bfloat16, device=ring.data.device)
    compressed_CD = None if compressed is None else ring_SD.new_empty(compressed.slots, ring.width)
    rows = min(positions_T.shape[0] + keys.window, ring.slots) + (0 if compressed is None else compressed.slots)
    most_blocks = _DECODE_BLOCKS_PER_SM * loader.multiprocessors(ring.data.device)
    loader.launch(
        "attention_prefill",
        "attention_prefill_decode",
        min(-(-rows * 32 // _DECODE_THREADS), most_blocks),
        _DECODE_THREADS,
        ring.data,
        ring.block_scale,
        None if compressed is None else compressed.data,
        None if compressed is None else compressed.block_scale,
        positions_T,
        ring_SD,
        compressed_CD,
        positions_T.shape[0],
        ring.slots,
        0 if compressed is None else compressed.slots,
        max(keys.ratio, 1),
        keys.window,
        device=ring.data.device,
        defines=_geometry(ring),
    )
    return ring_SD, compressed_CD


def _geometry(ring: RowCache) -> loader.Defines:
    return (("DIM", ring.width), ("ROPE", ring.rope_width))


def _check(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> None:
    tokens, heads, width = q_THD.shape
    rope_width = keys.ring.rope_width
    _expect("q_THD", q_THD, torch.bfloat16, (tokens, heads, keys.ring.width), q_THD.device, contiguous=False)
    _expect("sink_H", sink_H, torch.float32, (heads,), q_THD.device)
    _expect("positions_T", positions_T, torch.int64, (tokens,), q_THD.device)
    _expect("inv_freq", inv_freq, torch.float32, (rope_width // 2,), q_THD.device)
    if width % 64 or width > 512 or rope_width % 8 or rope_width > 64:
        found = f"width {width} with {rope_width} rotary"
        raise ValueError(f"q_THD: found {found}, expected 64·n up to 512 with 8·n up to 64")
    for name, cache in (("keys.ring", keys.ring), ("keys.compressed", keys.compressed)):
        if cache is not None:
            _check_cache(name, cache, keys.ring)
    if selected_TK is not None:
        if keys.compressed is None:
            raise ValueError("selected_TK: found a tensor, expected None without compressed entries")
        _expect("selected_TK", selected_TK, torch.int64, (tokens, selected_TK.shape[-1]), q_THD.device)


def _check_cache(name: str, cache: RowCache, ring: RowCache) -> None:
    quantised = cache.width - cache.rope_width
    if cache.format is RowFormat.KV_FP8 and quantised % 16 == 0:
        expected = torch.uint8
    elif cache.format is RowFormat.PLAIN:
        expected = torch.bfloat16
    else:
        found = f"{cache.format.value} with {quantised} quantised values"
        raise ValueError(f"{name}: found {found}, expected kv_fp8 with 16·n or plain")
    if (cache.format, cache.width, cache.rope_width) != (ring.format, ring.width, ring.rope_width):
        raise ValueError(f"{name}: found {cache.format.value} {cache.width}, expected that of the ring")
    _expect(name, cache.data, expected, tuple(cache.data.shape), ring.data.device)


def _expect(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, contiguous: bool = True
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device or device.type != "cuda":
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {shape} on {device} (CUDA)")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: found strides {tensor.stride()}, expected contiguous")
