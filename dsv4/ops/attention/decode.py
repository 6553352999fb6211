"""Attention of 1 to 8 tokens over the key caches: flash-decoding by clusters of blocks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.integers import ceil_div, round_up
from dsv4.launch.constants import RowCode
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.attention.any_geometry import attention_any_geometry
from dsv4.ops.attention.inputs import AttentionInputs, check_alignment
from dsv4.ops.key_rows import row_code

_WIDTH = 512
_ROPE_WIDTH = 64
_HEADS = 16
_WARP = 32
# Chosen by measurement (docs/benchmarks/kernel_rounds_h200.txt, "16 warps"). 16 were slower at most
# shapes; they won for HCA from 1,152 keys on, and for Flash CSA at T = 2 in one of the rounds.
_WARPS = 8
# The largest cluster that every GPU of an architecture can launch.
_CLUSTER = 8
# Below this many keys one cluster is taken to be faster than several and their merging. No record
# holds the crossing point.
_SPLIT_KEYS = 2048
# A thread of the last cluster holds the results of all splits in registers, OUT + 2 floats of each.
_MOST_SPLITS = 4
_SHARED_BYTES_LIMIT = 227 << 10
_ROW_BYTES = {RowCode.KV_FP8.value: 576, RowCode.BF16.value: 1024}
# Up to so many clusters at a time, with a list, let the next kernel start only when their rows are
# there: its weight requests would slow them down, and it has few enough weights to catch up.
_FEW_CLUSTERS = 2
# Bytes behind a row in shared memory, which keep its neighbours' accesses apart.
_ROW_PADDING = 32


class _Stages(NamedTuple):
    """How a block holds its keys: in ``count`` stages of ``rows`` each."""

    rows: int
    count: int


# The first that holds all keys of a block, else the last, whose two stages take turns. Two stages
# of 80 rows instead of one of 160 were 0.7 µs slower.
_STAGES = {
    RowCode.KV_FP8.value: (_Stages(80, 1), _Stages(160, 1), _Stages(80, 2)),
    RowCode.BF16.value: (_Stages(80, 1), _Stages(64, 2)),
}


def sparse_attention(
    recording: Recording,
    q_THD: Tensor,
    keys: KeySet,
    selected_TK: Tensor | None,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    """``dsv4.ops.attention.sparse_attention`` for bfloat16 q ``[T, H, D]``: bfloat16 ``[T, H, D]``.

    Caches KV_FP8 or PLAIN; ``selected_TK`` int64 or None; sink float32 ``[H]``; positions int64;
    inv_freq float32 ``[R/2]``. Listed entries outside the cache count as −1. Rows of 512 values
    with 64 rotary ones, fp8 or bfloat16, take the fast kernel, any other geometry and float32 rows
    a plain one. q · k is exact in its products (|q| < 2^20 with fp8 rows); weights carry 11 bits or
    more for fp8 values and 8 for bfloat16 ones, and none for an fp8 block of 64 values whose scale
    is 2^-15 or less of the largest among the keys beside it; the sums are float32. Same bits on
    every call. Raises ``ValueError`` for another dtype, shape or layout.
    """
    inputs = AttentionInputs.checked(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
    return _attention(recording, inputs)


def block_attention(
    recording: Recording,
    q_THD: Tensor,
    keys: KeySet,
    sink_H: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
) -> Tensor:
    """``dsv4.ops.attention.block.block_attention``, as ``sparse_attention``."""
    seen = KeySet(keys.ring, None, 0, keys.window + positions_T.shape[0])
    inputs = AttentionInputs.checked(q_THD, seen, None, sink_H, positions_T, inv_freq)
    return _attention(recording, inputs, as_last=True)


def _attention(recording: Recording, inputs: AttentionInputs, as_last: bool = False) -> Tensor:
    if not _is_usual(inputs):
        return attention_any_geometry(recording, inputs, as_last)
    check_alignment(inputs.q_THD)
    return _flash_decoding(recording, inputs, as_last)


def _flash_decoding(recording: Recording, inputs: AttentionInputs, as_last: bool) -> Tensor:
    keys = inputs.keys
    tokens, heads, width = inputs.q_THD.shape
    groups = ceil_div(heads, _HEADS)
    splits = _splits(inputs, groups, recording.target)
    out_THD = recording.empty_like(inputs.q_THD)
    partial = None
    counters = None
    if splits > 1:
        finished = _CLUSTER * groups * tokens
        floats = _HEADS * _WIDTH // _CLUSTER + 2 * _WARP * _WARPS
        partial = recording.empty((splits * finished, floats), torch.float32)
        counters = recording.zeroed("attention_decode", finished)
    recording.launch(
        _shape(inputs, recording.target, splits, as_last),
        _dense_shape(recording, inputs),
        q=inputs.q_THD,
        positions=inputs.positions_T,
        sinks=inputs.sink_H,
        inv_freq=inputs.inv_freq,
        **inputs.cache_arguments,
        selected=inputs.selected_TK,
        out=out_THD,
        partial=partial,
        counters=counters,
        heads=heads,
        ring_slots=keys.ring.slots,
        ratio=max(keys.ratio, 1),
        window=keys.window,
        scale_log2=width**-0.5 * math.log2(math.e),
    )
    return out_THD


def _shape(
    inputs: AttentionInputs, target: Target, splits: int = 1, as_last: bool = False
) -> Shape:
    tokens, heads, _ = inputs.q_THD.shape
    groups = ceil_div(heads, _HEADS)
    defines = _defines(inputs, target, splits, tokens * groups)
    if as_last:
        defines = (*defines, ("AS_LAST", 1))
    return Shape(
        Kernel("attention/attention_decode", "attention_decode", defines),
        (splits * _CLUSTER, groups, tokens),
        _WARP * _WARPS,
        dict(defines)["SHARED_BYTES"] + _list_bytes(inputs),
        _CLUSTER,
        {"entries": inputs.entries, "listed": inputs.listed},
        settles=True,
    )


def _dense_shape(recording: Recording, inputs: AttentionInputs) -> Shape | None:
    """For steps whose tokens see no more entries than are listed: all that are complete, without a
    list. The same keys in the same order, so the same bits. None: there are no such steps.
    """
    compressed = inputs.keys.compressed
    if inputs.selected_TK is None or compressed is None or _most_keys(inputs) > _SPLIT_KEYS:
        return None
    if not recording.leave_choice_out(inputs.selected_TK):
        return None
    return _shape(inputs.all_of_first(inputs.listed), recording.target)


def _is_usual(inputs: AttentionInputs) -> bool:
    """Whether the fast kernel knows these rows and has room for the list."""
    ring = inputs.keys.ring
    format = row_code(ring)
    if format not in _STAGES or (ring.width, ring.rope_width) != (_WIDTH, _ROPE_WIDTH):
        return False
    most_bytes = max(_block_bytes(format, stages) for stages in _STAGES[format])
    return most_bytes + _list_bytes(inputs) <= _SHARED_BYTES_LIMIT


def _splits(inputs: AttentionInputs, groups: int, target: Target) -> int:
    """Clusters that share the keys of a group of 16 heads, if there are that many keys.

    As many as run at once for one token: a second wave costs more than the split gains. More tokens
    take as many, so that the bits of a token do not go with their number.
    """
    if inputs.selected_TK is not None or _most_keys(inputs) <= _SPLIT_KEYS:
        return 1
    return min(max(target.resident_clusters(_CLUSTER) // groups, 1), _MOST_SPLITS)


def _defines(inputs: AttentionInputs, target: Target, splits: int, units: int) -> Defines:
    format = row_code(inputs.keys.ring)
    listed = inputs.selected_TK is not None
    turns = _turns(_most_keys(inputs))
    fitting = [stages for stages in _STAGES[format] if turns <= stages.rows]
    stages = (fitting or _STAGES[format][-1:])[0]
    return (
        ("FORMAT", format),
        ("LISTED", int(listed)),
        ("CLUSTER", _CLUSTER),
        ("TILE", stages.rows),
        ("STAGES", stages.count),
        ("WARPS", _WARPS),
        ("SPLITS", splits),
        ("SPLIT_KEYS", _SPLIT_KEYS),
        ("ROWS_FIRST", int(listed and stages.count == 1 and units <= _FEW_CLUSTERS)),
        ("WAVE", target.resident_clusters(_CLUSTER)),
        ("SHARED_BYTES", _block_bytes(format, stages)),
    )


def _most_keys(inputs: AttentionInputs) -> int:
    """The most keys of one token."""
    compressed = inputs.entries if inputs.selected_TK is None else inputs.listed
    return inputs.keys.window + compressed


def _turns(keys: int) -> int:
    """The most keys of one block: those of a cluster take keys in turns of four."""
    return ceil_div(keys, 4 * _CLUSTER) * 4


def _list_bytes(inputs: AttentionInputs) -> int:
    """Shared memory for the list of a block's keys."""
    return _turns(inputs.keys.window + inputs.listed) * 4


def _block_bytes(format: int, stages: _Stages) -> int:
    """Shared memory of a block without its list: ``sizeof(Shared)``, which the kernel asserts."""
    rows = stages.count * stages.rows * (_ROW_BYTES[format] + _ROW_PADDING)
    logits = 4 * _HEADS * (stages.rows + 8) * 4
    # In f16 for e4m3 groups, in bf16 for the others.
    weight_rows = 2 * _HEADS if format == RowCode.KV_FP8 else _HEADS + 1
    weights = weight_rows * (ceil_div(2 * stages.rows, 128) * 64 + 16) * 2
    # Block scales of a row's 8 groups, relative to the largest.
    factors = 8 * stages.rows * 2
    # What the blocks of a cluster exchange: f16 results, a scale per piece, two floats per head.
    merge = _HEADS * _WIDTH * 2 + 4 * 32 + _CLUSTER * _HEADS * 8
    # Rescaling and sink per head, the turns, a count per warp, the flag of the last block and the
    # barrier.
    others = 2 * _HEADS * 4 + _ROPE_WIDTH * 4 + _WARPS * 4 + 8 + 16
    return round_up(rows + logits + weights + factors + merge + others, 16)
