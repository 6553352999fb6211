"""Reported faults of short contexts, ties, NaN and memory layouts: rows J of docs/regressions.md.

Inputs are bfloat16, so that both op tables take them; steps of 9 tokens and more are prefill forms.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import Ops
from tests.ops.cases import (
    HEAD_DIM,
    ROPE_DIM,
    WINDOW,
    assert_near,
    integers,
    inv_freq,
    normal,
    on_device,
    positions,
)

WIDTH = 128
HEADS = 8
INDEX_FORMATS = [RowFormat.PLAIN, RowFormat.INDEX_FP8]
KEY_FORMATS = [RowFormat.PLAIN, RowFormat.KV_FP8]
# Two roundings to bfloat16 of the result, one of the weights.
BOUND = 2**-7


def name_of(format: RowFormat) -> str:
    return format.value


def rows_of(values_SD: Tensor, format: RowFormat) -> RowCache:
    slots, width = values_SD.shape
    device = torch.get_default_device()
    cache = RowCache.allocate(slots, width, ROPE_DIM, format, torch.bfloat16, device)
    cache.write(torch.arange(slots), values_SD)
    return cache


def select(
    ops: Ops, q_TID: Tensor, keys: RowCache, positions_T: Tensor, topk: int, weight: float = 1.0
) -> Tensor:
    weight_TI = torch.full(q_TID.shape[:2], weight)
    return ops.index_select(q_TID, weight_TI, 1.0, keys, positions_T, topk)


def reading_column_1(tokens: int) -> Tensor:
    """Index queries whose score is what a key holds in column 1, if that is positive."""
    q_TID = torch.zeros(tokens, HEADS, WIDTH, dtype=torch.bfloat16)
    q_TID[:, 3, 1] = 1
    return q_TID


@pytest.mark.parametrize("format", INDEX_FORMATS, ids=name_of)
@pytest.mark.parametrize(("slots", "tokens"), [(600, 1), (600, 20), (20_000, 1)])
def test_spec11_j60_ties_at_the_border_go_to_the_lowest_entries(
    ops: Ops, format: RowFormat, slots: int, tokens: int
) -> None:
    """5 entries are better than the rest, 300 tie for the other 59 places, in 20 runs."""
    order = torch.randperm(slots, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    values_SD = torch.zeros(slots + 8, WIDTH)
    values_SD[:slots, 1] = 1
    values_SD[on_device(order[:305]), 1] = 2
    values_SD[on_device(order[:5]), 1] = 3
    expected = {*order[:5].tolist(), *sorted(order[5:305].tolist())[:59]}
    keys = rows_of(values_SD, format)
    position_T = 4 * slots - 1 + torch.arange(tokens)
    for _ in range(20):
        selected_TK = select(ops, reading_column_1(tokens), keys, position_T, 64)
        assert [set(row) for row in selected_TK.tolist()] == [expected] * tokens


@pytest.mark.parametrize("format", INDEX_FORMATS, ids=name_of)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_spec11_j66_j67_nothing_is_listed_before_the_first_entry(
    ops: Ops, format: RowFormat, tokens: int
) -> None:
    keys = rows_of(torch.full((4, WIDTH), torch.nan), format)
    q_TID = normal(tokens, HEADS, WIDTH, seed=1, dtype=torch.bfloat16)
    for start in range(3):
        selected_TK = select(ops, q_TID, keys, start + torch.arange(tokens), 16)
        before = 3 - start
        assert selected_TK[:before].tolist() == [[-1] * 4] * min(before, tokens)


@pytest.mark.parametrize("format", KEY_FORMATS, ids=name_of)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_spec11_j66_j67_attention_without_entries_is_that_of_the_window(
    ops: Ops, format: RowFormat, ratio: int, tokens: int
) -> None:
    """At positions 0 to 2, and with a list of nothing behind them; entries hold NaN."""
    ring = rows_of(normal(160, HEAD_DIM, seed=2), format)
    nothing = rows_of(torch.full((4, HEAD_DIM), torch.nan), format)
    selected_TK = torch.full((tokens, 16), -1) if ratio == 4 else None
    rest = normal(2, seed=4)
    for start in range(3):
        q_THD = normal(tokens, 2, HEAD_DIM, seed=3, dtype=torch.bfloat16)
        step = rest, start + torch.arange(tokens), inv_freq(ratio)
        window = ops.sparse_attention(q_THD, KeySet(ring, None, 0, WINDOW), None, *step)
        keys = KeySet(ring, nothing, ratio, WINDOW)
        found = ops.sparse_attention(q_THD, keys, selected_TK, *step)
        assert_near(found, window, BOUND)


@pytest.mark.parametrize("format", INDEX_FORMATS, ids=name_of)
@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("where", ["query", "weight", "keys", "one key"])
def test_spec11_j68_nan_scores_list_entries_that_exist_once(
    ops: Ops, format: RowFormat, tokens: int, where: str
) -> None:
    values_SD = normal(200, WIDTH, seed=5)
    q_TID = normal(tokens, HEADS, WIDTH, seed=6, dtype=torch.bfloat16)
    if where == "query":
        q_TID[0] = torch.nan
    if where.endswith("key"):
        values_SD[7] = torch.nan
    if where == "keys":
        values_SD[:] = torch.nan
    weight = torch.nan if where == "weight" else 1.0
    for last in (59, 250, 799):
        position_T = torch.arange(last - tokens + 1, last + 1)
        found = select(ops, q_TID, rows_of(values_SD, format), position_T, 32, weight).tolist()
        for row, position in zip(found, position_T.tolist(), strict=True):
            visible = (position + 1) // 4
            listed = [entry for entry in row if entry != -1]
            assert len(set(listed)) == len(listed) <= 32
            assert all(0 <= entry < visible for entry in listed)


@pytest.mark.parametrize("format", INDEX_FORMATS, ids=name_of)
def test_spec11_j69_contexts_of_up_to_a_list_and_one_entry(ops: Ops, format: RowFormat) -> None:
    """Every position up to 17 entries, for a list of 16: all are listed while they fit."""
    keys = rows_of(normal(18, WIDTH, seed=7), format)
    tokens = 4 * 18
    q_TID = normal(tokens, HEADS, WIDTH, seed=8, dtype=torch.bfloat16)
    together_TK = select(ops, q_TID, keys, torch.arange(tokens), 16)
    for position in range(tokens):
        part = slice(position, position + 1)
        alone_TK = select(ops, q_TID[part], keys, positions(position), 16)
        visible = (position + 1) // 4
        for row in (together_TK[position].tolist(), alone_TK[0].tolist()):
            listed = set(row) - {-1}
            assert listed <= set(range(visible))
            assert len(listed) == min(visible, 16)
            assert row.count(-1) == 16 - len(listed)


def whole_number_queries(tokens: int) -> Tensor:
    q_TID = integers(-2, 2, tokens, HEADS, WIDTH, seed=9, dtype=torch.bfloat16)
    q_TID[..., 0] = 448
    return q_TID


@pytest.mark.parametrize("tokens", [1, 9])
def test_spec11_j74_a_selection_does_not_depend_on_the_capacity(
    ops: Ops, backend: str, tokens: int
) -> None:
    """Whole numbers make every score exact. 32 entries in a cache of as many, and in a large one
    that holds NaN behind them.
    """
    values_SD = integers(-2, 2, 32, WIDTH, seed=10)
    values_SD[:, 0] = 0
    large = rows_of(values_SD.new_full((capacity(backend), WIDTH), torch.nan), RowFormat.PLAIN)
    large.data[:32] = values_SD
    lists = [
        select(ops, whole_number_queries(tokens), keys, 119 + torch.arange(tokens), 16)
        for keys in (rows_of(values_SD, RowFormat.PLAIN), large)
    ]
    assert torch.equal(*(list_TK.sort(dim=1).values for list_TK in lists))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 9])
def test_spec11_j74_attention_does_not_depend_on_the_capacity(
    ops: Ops, backend: str, ratio: int, tokens: int
) -> None:
    ring = rows_of(normal(160, HEAD_DIM, seed=11), RowFormat.KV_FP8)
    small = rows_of(normal(32, HEAD_DIM, seed=12), RowFormat.KV_FP8)
    device = torch.get_default_device()
    large = RowCache.allocate(
        capacity(backend), HEAD_DIM, ROPE_DIM, RowFormat.KV_FP8, torch.bfloat16, device
    )
    assert large.block_scale is not None
    assert small.block_scale is not None
    large.data.fill_(0x7F)
    large.block_scale.fill_(0xFF)
    large.data[:32] = small.data
    large.block_scale[:32] = small.block_scale
    selected_TK = torch.arange(32).expand(tokens, 32).contiguous() if ratio == 4 else None
    q_THD = normal(tokens, 2, HEAD_DIM, seed=13, dtype=torch.bfloat16)
    step = normal(2, seed=14), 32 * ratio - tokens + torch.arange(tokens), inv_freq(ratio)
    in_small, in_large = (
        ops.sparse_attention(q_THD, KeySet(ring, rows, ratio, WINDOW), selected_TK, *step)
        for rows in (small, large)
    )
    assert_near(in_large, in_small, BOUND)


def capacity(backend: str) -> int:
    """200,000 entries, where reading all of them takes no seconds."""
    return 200_000 if backend == "cuda" else 20_000


def in_pool(cache: RowCache) -> RowCache:
    """The same rows in the middle of memory that holds NaN, at a multiple of 16 bytes."""

    def moved(part: Tensor) -> Tensor:
        pool = torch.full((part.nbytes + 2 * 4112,), 0xFF, dtype=torch.uint8)
        return pool[4112 : 4112 + part.nbytes].view(part.dtype).view(part.shape).copy_(part)

    scale = None if cache.block_scale is None else moved(cache.block_scale)
    return replace(cache, data=moved(cache.data), block_scale=scale)


def strided(cache: RowCache) -> RowCache:
    """The same rows with NaN between them."""
    wide = torch.full((cache.slots, cache.data.nbytes // cache.slots + 64), 0xFF, dtype=torch.uint8)
    data = wide.view(cache.data.dtype)[:, : cache.data.shape[1]]
    return replace(cache, data=data.copy_(cache.data))


def assert_same_anywhere(call: Callable[[RowCache], Tensor], cache: RowCache) -> None:
    """What the call gives for a cache it gives in a pool; with strides as well, unless it refuses
    them by name.
    """
    expected = call(cache)
    assert torch.equal(call(in_pool(cache)), expected)
    try:
        found = call(strided(cache))
    except ValueError as error:
        if "found strides" not in str(error):
            raise
        return
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", INDEX_FORMATS, ids=name_of)
@pytest.mark.parametrize("tokens", [1, 9])
def test_spec11_j64_index_keys_anywhere_in_a_pool(ops: Ops, format: RowFormat, tokens: int) -> None:
    q_TID = normal(tokens, HEADS, WIDTH, seed=15, dtype=torch.bfloat16)
    position_T = 790 + torch.arange(tokens)
    assert_same_anywhere(
        lambda keys: select(ops, q_TID, keys, position_T, 32),
        rows_of(normal(200, WIDTH, seed=16), format),
    )


@pytest.mark.parametrize("format", KEY_FORMATS, ids=name_of)
@pytest.mark.parametrize("part", ["ring", "compressed"])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 9])
def test_spec11_j64_keys_anywhere_in_a_pool(
    ops: Ops, format: RowFormat, part: str, ratio: int, tokens: int
) -> None:
    ring = rows_of(normal(160, HEAD_DIM, seed=17), format)
    keys = KeySet(ring, rows_of(normal(40, HEAD_DIM, seed=18), format), ratio, WINDOW)
    selected_TK = torch.arange(40).expand(tokens, 40).contiguous() if ratio == 4 else None
    q_THD = normal(tokens, 2, HEAD_DIM, seed=19, dtype=torch.bfloat16)
    step = normal(2, seed=20), 40 * ratio - tokens + torch.arange(tokens), inv_freq(ratio)

    def attend(cache: RowCache) -> Tensor:
        moved = replace(keys, **{part: cache})
        return ops.sparse_attention(q_THD, moved, selected_TK, *step)

    assert_same_anywhere(attend, getattr(keys, part))
