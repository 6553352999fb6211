"""Kernels whose rows lie behind 2^31 bytes or elements, executed on the CPU: far beyond what a
context of 2^20 tokens reaches. Memory that nothing touches costs nothing.
"""

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat, row_shapes
from dsv4.ops import attention, kv_write
from dsv4.ops.attention.any_geometry import attention_any_geometry
from dsv4.ops.attention.inputs import AttentionInputs
from dsv4.ops.indexer import decode as indexer_decode
from dsv4.ops.kv_write.rows import KeyRows, write_by_blocks
from tests.ops.cases import EPS, HEAD_DIM, ROPE_DIM, normal
from tests.ops.indexer.meta import selection
from tests.ops.recorded import launches, meta
from tests.ptx.faults import OutOfBounds
from tests.ptx.nvrtc import SourceEdit, run_recorded

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
INT64 = torch.int64
BEYOND = 1 << 31
# Frequencies are 0 here. The sine of large angles takes local memory, which the machine lacks.
STILL = SourceEdit(
    "rope.cuh",
    "sincosf(__fmul_rn((float)position, inv_freq), &turn.sine, &turn.cosine);",
    "turn.cosine = 1.0f, turn.sine = 0.0f;",
)
# What an overflow would be: a slot that is multiplied in 32 bits.
NARROW_ROW = SourceEdit(
    "kv_rows.cuh",
    "return data + slot * row_bytes();",
    "return data + (int)slot * row_bytes();",
    STILL,
)


def untouched(nbytes: int) -> Tensor:
    """Bytes, zero or not, of which the system gives those that are touched."""
    return torch.empty(nbytes, dtype=torch.uint8)


def far_cache(slots: int, width: int, format: RowFormat) -> RowCache:
    """A cache of which no row is touched yet."""
    parts = [
        None
        if shape is None
        else untouched(slots * shape[0] * shape[1].itemsize).view(shape[1]).view(slots, -1)
        for shape in row_shapes(width, ROPE_DIM, format, BF16)
    ]
    assert parts[0] is not None
    return RowCache(parts[0], parts[1], format, width, ROPE_DIM)


def like(cache: RowCache) -> RowCache:
    """The same without memory."""
    scale = None if cache.block_scale is None else cache.block_scale.to("meta")
    return RowCache(cache.data.to("meta"), scale, cache.format, cache.width, cache.rope_width)


def test_scores_of_a_token_behind_2_to_the_31_others() -> None:
    """Three tokens whose rows of scores are 2^30 apart: selected are those that are highest."""
    stride = 1 << 30
    arguments = selection(3, stride, heads=1, format=RowFormat.PLAIN)
    _, top_k = launches(indexer_decode.index_select, *arguments, tokens=3)
    assert top_k.arguments["stride"] == stride
    orders = untouched(4 * (2 * stride + 1024)).view(torch.int32)
    position_T = torch.full((3,), 4 * 600 - 1)
    best = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:512].sort().values
    for token in range(3):
        # Above 2^23 - 1, the order of -inf; as unsigned numbers.
        row = torch.full((600,), 1 << 24, dtype=torch.int32)
        row[(best + token) % 600] = 1 << 25
        orders[token * stride : token * stride + 600] = row
    out = torch.full((3, 512), -7)
    given = {"orders": orders, "positions": position_T, "out": out}
    run_recorded(top_k, "sm_90a", given, 3)
    for token in range(3):
        assert out[token].tolist() == ((best + token) % 600).sort().values.tolist()
    narrow = SourceEdit("top_k.cu", "orders + (int64)token * stride", "orders + token * stride")
    with pytest.raises(OutOfBounds):
        run_recorded(top_k, "sm_90a", given, 3, edit=narrow)


def test_a_ring_of_more_than_2_to_the_31_bytes_is_written() -> None:
    slots = BEYOND // 576 + 100
    own, other = (far_cache(slots, HEAD_DIM, RowFormat.KV_FP8) for _ in range(2))
    kv_TD = normal(1, HEAD_DIM, seed=1, dtype=BF16)
    norm = normal(HEAD_DIM, seed=2)
    still = torch.zeros(ROPE_DIM // 2)
    position_T = torch.tensor([3 * slots - 1])
    kv_write.kv_write(kv_TD, norm, position_T, still, other, EPS)
    float32 = torch.float32
    rows = KeyRows(
        meta(1, HEAD_DIM),
        meta(HEAD_DIM, dtype=float32),
        meta(1, dtype=INT64),
        meta(ROPE_DIM // 2, dtype=float32),
        like(own),
        EPS,
    )
    (launch,) = launches(write_by_blocks, rows, "kv_write", tokens=1)
    assert own.block_scale is not None
    given = {
        "kv": kv_TD,
        "norm_weight": norm,
        "positions": position_T,
        "inv_freq": still,
        "data": own.data,
        "scale": own.block_scale,
    }
    run_recorded(launch, "sm_90a", given, 1, edit=STILL)
    one, two = (cache.read(torch.tensor([slots - 1])) for cache in (own, other))
    assert float((one - two).abs().max()) <= 2**-3 * float(two.abs().max())
    with pytest.raises(OutOfBounds):
        run_recorded(launch, "sm_90a", given, 1, edit=NARROW_ROW)


def test_an_entry_behind_2_to_the_31_bytes_is_attended_to() -> None:
    slot = BEYOND // 576 + 100
    entries = far_cache(slot + 1, HEAD_DIM, RowFormat.KV_FP8)
    entries.write(torch.tensor([slot]), normal(1, HEAD_DIM, seed=1))
    ring = RowCache.allocate(20, HEAD_DIM, ROPE_DIM, RowFormat.KV_FP8, BF16, torch.device("cpu"))
    ring.write(torch.arange(20), normal(20, HEAD_DIM, seed=2))
    position_T = torch.tensor([4 * slot + 3])
    selected_TK = torch.tensor([[-1, slot]])
    q_THD = normal(1, 2, HEAD_DIM, seed=3, dtype=BF16)
    sink_H = normal(2, seed=4)
    still = torch.zeros(ROPE_DIM // 2)
    keys = KeySet(ring, entries, 4, 3)
    exact = attention.sparse_attention(q_THD.float(), keys, selected_TK, sink_H, position_T, still)
    float32 = torch.float32
    inputs = AttentionInputs.checked(
        meta(1, 2, HEAD_DIM),
        KeySet(like(ring), like(entries), 4, 3),
        meta(1, 2, dtype=INT64),
        meta(2, dtype=float32),
        meta(1, dtype=INT64),
        meta(ROPE_DIM // 2, dtype=float32),
    )
    (launch,) = launches(attention_any_geometry, inputs, tokens=1)
    out = torch.zeros(1, 2, HEAD_DIM, dtype=BF16)
    assert ring.block_scale is not None
    assert entries.block_scale is not None
    given = {
        "q": q_THD,
        "positions": position_T,
        "sinks": sink_H,
        "inv_freq": still,
        "ring_data": ring.data,
        "ring_scale": ring.block_scale,
        "entries_data": entries.data,
        "entries_scale": entries.block_scale,
        "selected": selected_TK,
        "out": out,
    }
    run_recorded(launch, "sm_90a", given, 1, edit=STILL)
    assert float((out.double() - exact.double()).norm() / exact.double().norm()) <= 5e-3
    with pytest.raises(OutOfBounds):
        run_recorded(launch, "sm_90a", given, 1, edit=NARROW_ROW)
