"""Attention over the key caches: flash-decoding for up to 8 tokens, the prefill kernels for more."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.config import MAX_DECODE_TOKENS
from dsv4.launch.loader import Given, Launch, launch, multiprocessors, prepare, zeroed_counters
from dsv4.ops.attention import KeySet
from dsv4.ops.attention.prefill import attention_prefill
from dsv4.ops.remembered import layouts, remembered

_WIDTH, _ROPE_WIDTH, _HEADS, _WARPS, _CLUSTER = 512, 64, 16, 8, 8
# Below this many keys one cluster is faster than several and their merging.
_SPLIT_KEYS, _MOST_SPLITS = 2048, 4
_SHARED_BYTES_LIMIT = 227 << 10
_PREFILL_LISTED = 2048
_ANY_THREADS = 128
_LOG2_E = 1.4426950408889634
# Row formats of kv_rows.cuh and the bytes of a row.
_KV_FP8, _BF16, _F32 = 0, 1, 2
_ROW_BYTES = {_KV_FP8: 576, _BF16: 1024}
# (rows in a stage, stages): the first that holds all keys of a block, else the last, whose two stages take turns.
_SHAPES = {_KV_FP8: ((80, 1), (160, 1), (80, 2)), _BF16: ((80, 1), (64, 2))}


def sparse_attention(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> Tensor:
    """``dsv4.ops.attention.sparse_attention`` for bfloat16 q ``[T, H, D]``: bfloat16 ``[T, H, D]``.

    Caches KV_FP8 or PLAIN; ``selected_TK`` int64 or None; sink float32 ``[H]``; positions int64; inv_freq float32
    ``[R/2]``. Listed entries outside the cache count as −1. Rows of 512 values with 64 rotary ones, fp8 or bfloat16,
    take the fast kernels, any other geometry and float32 rows a plain one. For up to 8 tokens q · k is exact in its
    products (|q| < 2^20 with fp8 rows); weights carry 11 bits or more for fp8 values and 8 for bfloat16 ones; the sums
    are float32. Same bits on every call. No tokens: empty. Raises ``ValueError`` for another dtype, shape or device, or
    strides in anything but q.
    """
    q_THD = q_THD.contiguous()
    if q_THD.data_ptr() % 16:
        q_THD = q_THD.clone()
    if keys.compressed is None:
        selected_TK = None
    arguments = (q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    if q_THD.shape[0] <= MAX_DECODE_TOKENS:
        varying = (q_THD, positions_T) if selected_TK is None else (q_THD, positions_T, selected_TK)
        decode = remembered(keys, (sink_H, inv_freq), layouts(*varying), _prepare_decode, *arguments)
        return _any_geometry(*arguments) if decode is None else decode(*varying)
    _check(*arguments)
    listed = 0 if selected_TK is None else selected_TK.shape[1]
    return (attention_prefill if _in_prefill(keys.ring, listed) else _any_geometry)(*arguments)


@dataclass(frozen=True)
class _Decode:
    """A decode step's attention of q, positions and, if there is a list of them, selected entries; ``partial`` is the
    shape of what clusters exchange that share keys.
    """

    launch: Launch
    partial: tuple[int, int] | None

    def __call__(self, q_THD: Tensor, *others: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        exchanged = () if self.partial is None else (torch.empty(self.partial, device=q_THD.device),)
        self.launch(q_THD, *others, out_THD, *exchanged)
        return out_THD


def _prepare_decode(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> _Decode | None:
    """None where only the plain kernel will do."""
    _check(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    compressed, listed = keys.compressed, 0 if selected_TK is None else selected_TK.shape[1]
    if q_THD.numel() == 0 or not _in_decode(keys, listed):
        return None
    tokens, heads, width = q_THD.shape
    entries, groups = 0 if compressed is None else compressed.slots, -(-heads // _HEADS)
    most_keys = keys.window + (entries if selected_TK is None else listed)
    splits = 1 if listed else _splits(most_keys, tokens * groups, q_THD.device)
    defines = decode_defines(_row_format(keys.ring), selected_TK is not None, most_keys, splits)
    partial = counters = None
    if splits > 1:
        partial = (splits * _CLUSTER * groups * tokens, _HEADS * _WIDTH // _CLUSTER + 64 * _WARPS)
        counters = zeroed_counters(q_THD.device, "attention_decode", _CLUSTER * groups * MAX_DECODE_TOKENS)
    launch = prepare(
        "attention_decode",
        "attention_decode",
        (splits * _CLUSTER, groups, tokens),
        32 * _WARPS,
        *_tensors(Tensor, keys, None if selected_TK is None else Tensor, sink_H, Tensor, inv_freq),
        Tensor,
        None if partial is None else Tensor,
        counters,
        heads,
        keys.ring.slots,
        entries,
        listed,
        max(keys.ratio, 1),
        keys.window,
        width**-0.5 * _LOG2_E,
        device=q_THD.device,
        shared_bytes=dict(defines)["SHARED_BYTES"] + _list_bytes(keys.window + listed),
        cluster=_CLUSTER,
        defines=defines,
    )
    return _Decode(launch, partial)


def _splits(most_keys: int, units: int, device: torch.device) -> int:
    """Clusters that share the keys of one unit (16 heads of a token), if there are that many keys at all."""
    if most_keys <= _SPLIT_KEYS:
        return 1
    # Clusters do not fit everywhere; a second wave would cost more than the split gains.
    fitting = multiprocessors(device) // _CLUSTER - 2
    return min(max(fitting // units, 1), _MOST_SPLITS)


def decode_defines(format: int, listed: bool, most_keys: int, splits: int = 1) -> tuple[tuple[str, int], ...]:
    """What ``attention_decode.cu`` is compiled with: a row format of kv_rows.cuh, with or without a list, for at most
    ``most_keys`` keys per token, which ``splits`` clusters share.
    """
    fits = [shape for shape in _SHAPES[format] if _turns(most_keys) <= shape[0]]
    tile, stages = (fits or _SHAPES[format][-1:])[0]
    return (
        ("FORMAT", format),
        ("LISTED", int(listed)),
        ("CLUSTER", _CLUSTER),
        ("TILE", tile),
        ("STAGES", stages),
        ("WARPS", _WARPS),
        ("SPLITS", splits),
        ("SPLIT_KEYS", _SPLIT_KEYS),
        ("SHARED_BYTES", _decode_bytes(format, tile, stages)),
    )


def _decode_bytes(format: int, tile: int, stages: int) -> int:
    """Shared memory of a block without its list of keys: ``sizeof(Shared)``, which the kernel asserts."""
    rows = stages * tile * (_ROW_BYTES[format] + 32)
    logits = 4 * _HEADS * (tile + 8) * 4
    # In f16 for e4m3 groups, in bf16 for the others.
    weights = (2 * _HEADS if format == _KV_FP8 else _HEADS + 1) * ((2 * tile + 127) // 128 * 64 + 16) * 2
    # Factors of 8 groups; what the blocks of a cluster exchange: f16 results, a scale per piece, two floats per head.
    merge = _HEADS * _WIDTH * 2 + 4 * 32 + _CLUSTER * _HEADS * 8
    total = rows + logits + weights + 16 * tile + merge + _HEADS * 4 + _WARPS * 4 + 8 + 16
    return -(-total // 16) * 16


def _list_bytes(keys: int) -> int:
    """Blocks of a cluster take keys in turns of four."""
    return _turns(keys) * 4


def _turns(keys: int) -> int:
    """Most keys of one block."""
    return -(-keys // (4 * _CLUSTER)) * 4


def _any_geometry(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> Tensor:
    out_THD = torch.empty_like(q_THD)
    if q_THD.numel() == 0:
        return out_THD
    tokens, heads, width = q_THD.shape
    compressed = keys.compressed
    launch(
        "attention_any",
        "attention_any",
        (heads, tokens),
        _ANY_THREADS,
        *_tensors(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq),
        out_THD,
        _row_format(keys.ring),
        heads,
        width,
        keys.ring.rope_width,
        keys.ring.slots,
        0 if compressed is None else compressed.slots,
        0 if selected_TK is None else selected_TK.shape[1],
        max(keys.ratio, 1),
        keys.window,
        width**-0.5,
        device=q_THD.device,
    )
    return out_THD


def _row_format(cache: RowCache) -> int:
    if cache.format is RowFormat.KV_FP8:
        return _KV_FP8
    return _BF16 if cache.data.dtype == torch.bfloat16 else _F32


def _in_decode(keys: KeySet, listed: int) -> bool:
    format = _row_format(keys.ring)
    if format == _F32 or (keys.ring.width, keys.ring.rope_width) != (_WIDTH, _ROPE_WIDTH):
        return False
    most_bytes = max(_decode_bytes(format, *shape) for shape in _SHAPES[format])
    return most_bytes + _list_bytes(keys.window + listed) <= _SHARED_BYTES_LIMIT


def _in_prefill(ring: RowCache, listed: int) -> bool:
    """What ``attention_prefill`` takes."""
    widths = ring.width % 64 == 0 and ring.width <= 512 and ring.rope_width % 8 == 0 and ring.rope_width <= 64
    aligned = ring.format is RowFormat.PLAIN or (ring.width - ring.rope_width) % 16 == 0
    return widths and aligned and _row_format(ring) != _F32 and listed <= _PREFILL_LISTED


def _check(
    q_THD: Tensor, keys: KeySet, selected_TK: Tensor | None, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> None:
    if q_THD.dtype != torch.bfloat16:
        raise ValueError(f"q_THD: found {q_THD.dtype}, expected torch.bfloat16")
    if q_THD.dim() != 3 or q_THD.shape[2] != keys.ring.width:
        raise ValueError(f"q_THD: found {list(q_THD.shape)}, expected [T, H, {keys.ring.width}]")
    tokens, heads, _ = q_THD.shape
    expect("sink_H", sink_H, torch.float32, (heads,), q_THD.device)
    expect("positions_T", positions_T, torch.int64, (tokens,), q_THD.device)
    expect("inv_freq", inv_freq, torch.float32, (keys.ring.rope_width // 2,), q_THD.device)
    check_rows("keys.ring", keys.ring, q_THD.device)
    if keys.compressed is not None:
        check_rows("keys.compressed", keys.compressed, q_THD.device)
        found, expected = ((c.format, c.data.dtype, c.width, c.rope_width) for c in (keys.compressed, keys.ring))
        if found != expected:
            raise ValueError(f"keys.compressed: found {found}, expected the ring's {expected}")
    if selected_TK is not None:
        expect("selected_TK", selected_TK, torch.int64, (tokens, selected_TK.shape[-1]), q_THD.device)


def check_rows(name: str, cache: RowCache, device: torch.device) -> None:
    """Raises ``ValueError`` unless ``cache`` holds KV_FP8 or plain key rows on ``device`` (CUDA)."""
    dtypes = (torch.uint8,) if cache.format is RowFormat.KV_FP8 else (torch.bfloat16, torch.float32)
    if cache.format is RowFormat.INDEX_FP8 or cache.data.dtype not in dtypes:
        raise ValueError(f"{name}: found {cache.data.dtype} {cache.format.value}, expected kv_fp8 or plain rows")
    row_bytes = cache.width + cache.rope_width if cache.format is RowFormat.KV_FP8 else cache.width
    expect(name, cache.data, cache.data.dtype, (cache.slots, row_bytes), device)
    if cache.block_scale is not None:
        scales = -(-(cache.width - cache.rope_width) // 512) * 8
        expect(f"{name}.block_scale", cache.block_scale, torch.uint8, (cache.slots, scales), device)


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ``ValueError`` unless ``tensor`` is contiguous and of this dtype, shape and CUDA device."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device or device.type != "cuda":
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {list(shape)} on {device} (CUDA)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: found strides {tensor.stride()}, expected contiguous")


def _tensors(
    q_THD: Given, keys: KeySet, selected_TK: Given | None, sink_H: Tensor, positions_T: Given, inv_freq: Tensor
) -> tuple[Tensor | Given | None, ...]:
    """The inputs in the order in which both kernels declare them."""
    compressed = keys.compressed
    rows = (None, None) if compressed is None else (compressed.data, compressed.block_scale)
    return q_THD, positions_T, sink_H, inv_freq, keys.ring.data, keys.ring.block_scale, *rows, selected_TK
