"""Sparse attention: window, compressed entries, sink, inverse rotation."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import Ops, attention
from tests.ops.cases import (
    HEAD_DIM,
    ROPE_DIM,
    VECTORS,
    WINDOW,
    assert_near,
    exact_rope,
    integers,
    inv_freq,
    normal,
    positions,
)

NO_SINK = -1e9
# Largest error over the largest value: float32 arithmetic, and two roundings to bfloat16 (before
# and after rotation). Found: 7.8e-7 and 4.9e-3.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
# Relative, of one value: found 6e-8, and half a unit in the last place.
ONE_ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8}


def row_cache(rows_SD: Tensor, format: RowFormat = RowFormat.PLAIN) -> RowCache:
    cache = RowCache.allocate(
        rows_SD.shape[0],
        rows_SD.shape[1],
        ROPE_DIM,
        format,
        torch.float32,
        torch.get_default_device(),
    )
    cache.write(torch.arange(rows_SD.shape[0]), rows_SD)
    return cache


def random_keys(
    ratio: int, format: RowFormat = RowFormat.PLAIN, ring: int = 160, entries: int = 40
) -> KeySet:
    compressed = row_cache(normal(entries, HEAD_DIM, seed=2), format) if ratio else None
    return KeySet(row_cache(normal(ring, HEAD_DIM, seed=1), format), compressed, ratio, WINDOW)


def exact_attention(
    q_HD: Tensor,
    keys: KeySet,
    selected: list[int] | None,
    sink_H: Tensor,
    position: int,
    frequencies: Tensor,
) -> Tensor:
    """One query in float64, key by key."""
    ring = keys.ring.read_all()
    window = range(max(0, position - keys.window + 1), position + 1)
    seen = [ring[p % keys.ring.slots] for p in window]
    if keys.compressed is not None:
        entries = (
            range((position + 1) // keys.ratio)
            if selected is None
            else [s for s in selected if s >= 0]
        )
        compressed = keys.compressed.read_all()
        seen += [compressed[s] for s in entries]
    rows_ND = torch.stack(seen).double()
    heads = []
    for q, sink in zip(q_HD.double(), sink_H.tolist(), strict=True):
        logits = [float(product) / math.sqrt(q_HD.shape[1]) for product in rows_ND @ q]
        peak = max([*logits, sink])
        shares = [math.exp(logit - peak) for logit in logits]
        total = sum(shares) + math.exp(sink - peak)
        heads.append(torch.tensor(shares, dtype=torch.float64) / total @ rows_ND)
    return exact_rope(torch.stack(heads), position, frequencies, inverse=True)


@pytest.mark.parametrize("ratio", [0, 128])
@pytest.mark.parametrize("start", [0, 1, 126, 127, 128, 300, 5100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_layers_equal_the_formula(
    ops: Ops, ratio: int, start: int, dtype: torch.dtype
) -> None:
    keys = random_keys(ratio)
    q_THD = normal(3, 2, HEAD_DIM, seed=3, dtype=dtype)
    sink_H = normal(2, seed=4)
    out = ops.sparse_attention(q_THD, keys, None, sink_H, start + torch.arange(3), inv_freq(ratio))
    assert out.dtype == dtype
    for t in range(3):
        exact = exact_attention(q_THD[t], keys, None, sink_H, start + t, inv_freq(ratio))
        assert_near(out[t], exact, BOUND[dtype])


@pytest.mark.parametrize(
    "format", [RowFormat.PLAIN, RowFormat.KV_FP8], ids=lambda format: format.value
)
@pytest.mark.parametrize("start", [0, 60, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selected_entries_equal_the_formula(
    ops: Ops, format: RowFormat, start: int, dtype: torch.dtype
) -> None:
    keys = random_keys(4, format)
    q_THD = normal(5, 3, HEAD_DIM, seed=5, dtype=dtype)
    sink_H = normal(3, seed=6)
    selected_TK = (
        integers(-8, 39, 5, 12, seed=7, dtype=torch.int64).clamp(min=-1).sort(dim=1).values
    )
    selected_TK[:, 1:] = selected_TK[:, 1:].masked_fill(
        selected_TK[:, 1:] == selected_TK[:, :-1], -1
    )
    out = ops.sparse_attention(
        q_THD, keys, selected_TK, sink_H, start + torch.arange(5), inv_freq(4)
    )
    for t in range(5):
        exact = exact_attention(
            q_THD[t], keys, selected_TK[t].tolist(), sink_H, start + t, inv_freq(4)
        )
        assert_near(out[t], exact, BOUND[dtype])


@pytest.mark.parametrize("larger", [-128.0, 0.0, 128.0])
def test_published_sink_softmax(ops: Ops, larger: float) -> None:
    """Keys whose scaled logits and values show the weights: logit in dimension 0, a unit value in
    dimension 1 + key. Where all logits are larger by the same number nothing changes.
    """
    case = VECTORS["sink"]
    rows_SD = torch.zeros(160, HEAD_DIM)
    rows_SD[:3, 0] = torch.tensor(case["logits"]) + larger
    rows_SD[:3, 1:4] = torch.eye(3)
    q_THD = torch.zeros(1, 1, HEAD_DIM)
    q_THD[0, 0, 0] = math.sqrt(HEAD_DIM)
    keys = KeySet(row_cache(rows_SD), None, 0, WINDOW)
    out = ops.sparse_attention(
        q_THD, keys, None, torch.tensor([case["sink"] + larger]), positions(2), inv_freq(0)
    )
    bound = 2e-7 if larger == 0 else 1e-5
    assert out[0, 0, 1:4].tolist() == pytest.approx(case["p"], abs=bound)


@pytest.mark.parametrize("sink", [-200.0, -3.0, 0.0, 3.0, 200.0])
def test_sink_is_in_the_denominator_only_and_not_scaled(
    ops: Ops, dtype: torch.dtype, sink: float
) -> None:
    """With q = 0 every key has weight 1 / (keys + exp(sink)), at any size of the sink."""
    rows_SD = torch.zeros(160, HEAD_DIM)
    rows_SD[:, 0] = 1.0
    keys = KeySet(row_cache(rows_SD), None, 0, WINDOW)
    out = ops.sparse_attention(
        torch.zeros(1, 1, HEAD_DIM, dtype=dtype),
        keys,
        None,
        torch.tensor([sink]),
        positions(9),
        inv_freq(0),
    )
    exact = 10 / (10 + math.exp(sink))
    assert float(out[0, 0, 0]) == pytest.approx(exact, rel=ONE_ROUNDING[dtype], abs=1e-30)


@pytest.mark.parametrize("position", [0, 3, 125, 126, 127, 200, 700])
def test_window_is_128_tokens_with_itself_and_entries_that_overlap_it_count_again(
    ops: Ops, dtype: torch.dtype, position: int
) -> None:
    ring = torch.zeros(160, HEAD_DIM)
    entry = torch.zeros(8, HEAD_DIM)
    ring[:, 0] = 1.0
    entry[:, 1] = 1.0
    keys = KeySet(row_cache(ring), row_cache(entry), 128, WINDOW)
    position_T = position + torch.arange(3)
    out = ops.sparse_attention(
        torch.zeros(3, 1, HEAD_DIM, dtype=dtype),
        keys,
        None,
        torch.tensor([NO_SINK]),
        position_T,
        inv_freq(128),
    )
    rel = ONE_ROUNDING[dtype]
    for t in range(3):
        window = min(position + t + 1, 128)
        entries = (position + t + 1) // 128
        assert float(out[t, 0, 0]) == pytest.approx(window / (window + entries), rel=rel)
        assert float(out[t, 0, 1]) == pytest.approx(entries / (window + entries), rel=rel)


@pytest.mark.parametrize("position", [1, 77, 100_000])
def test_output_is_rotated_back_at_the_query_position(ops: Ops, position: int) -> None:
    """A window of one token returns that token's own row as it was before its rotation."""
    raw_SD = normal(8, HEAD_DIM, seed=8)
    rows_SD = torch.stack([exact_rope(row, position, inv_freq(4)).float() for row in raw_SD])
    keys = KeySet(row_cache(rows_SD), None, 0, 1)
    out = ops.sparse_attention(
        normal(1, 2, HEAD_DIM, seed=9),
        keys,
        None,
        torch.full((2,), NO_SINK),
        positions(position),
        inv_freq(4),
    )
    torch.testing.assert_close(out[0], raw_SD[position % 8].expand(2, -1), rtol=0, atol=2e-6)


def test_spec11_a03_logits_are_scaled_by_the_head_dimension_alone(ops: Ops) -> None:
    """Two keys with logit difference 512^(−1/2) · 448 · 0.125: a factor of 1.277 or its square
    would show. The product with the key is 56 in any order of its sum. What is left are roundings
    to float32: of the factor and of the logit 2.5 units of 2^-24 each, of the exponential 2, of the
    two quotients 1 each.
    """
    rows_SD = torch.zeros(160, HEAD_DIM)
    rows_SD[1, :448] = 0.125
    rows_SD[0, 448] = 1.0
    rows_SD[1, 449] = 1.0
    q_THD = torch.ones(1, 1, HEAD_DIM)
    q_THD[..., 448:] = 0.0
    keys = KeySet(row_cache(rows_SD), None, 0, WINDOW)
    out = ops.sparse_attention(
        q_THD, keys, None, torch.tensor([NO_SINK]), positions(1), torch.zeros(32)
    )[0, 0]
    ratio = float(out[449]) / float(out[448])
    assert math.log(ratio) == pytest.approx(56 / math.sqrt(512), rel=0, abs=2**-20)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("position", [2, 140, 300])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_slots_that_hold_no_visible_key_may_hold_anything(
    ops: Ops, dtype: torch.dtype, ratio: int, position: int, poison: float
) -> None:
    q_THD = normal(1, 2, HEAD_DIM, seed=10, dtype=dtype)
    sink_H = normal(2, seed=11)
    selected_TK = torch.tensor([[0, -1, 2, -1]]) if ratio == 4 and position > 11 else None
    if ratio == 4 and selected_TK is None:
        selected_TK = torch.full((1, 4), -1)
    outputs = []
    for poisoned in (False, True):
        keys = random_keys(ratio)
        assert keys.compressed is not None
        if poisoned:
            seen = [p % 160 for p in range(max(0, position - 127), position + 1)]
            keys.ring.data[[slot for slot in range(160) if slot not in seen]] = poison
            visible = (
                range((position + 1) // 128) if selected_TK is None else selected_TK[0].tolist()
            )
            keys.compressed.data[[slot for slot in range(40) if slot not in visible]] = poison
        outputs.append(
            ops.sparse_attention(
                q_THD, keys, selected_TK, sink_H, positions(position), inv_freq(ratio)
            )
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_tokens_together_give_what_each_gives_alone(
    ops: Ops, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and tiles of any size agree; 70 tokens are more than one tile."""
    keys = random_keys(ratio, ring=300)
    count = 70
    start = 200
    q_THD = normal(count, 2, HEAD_DIM, seed=12)
    sink_H = normal(2, seed=13)
    position_T = start + torch.arange(count)
    selected_TK = integers(0, 39, count, 6, seed=14, dtype=torch.int64) if ratio == 4 else None
    whole = ops.sparse_attention(q_THD, keys, selected_TK, sink_H, position_T, inv_freq(ratio))
    for t in range(count):
        selected = None if selected_TK is None else selected_TK[t : t + 1]
        alone = ops.sparse_attention(
            q_THD[t : t + 1], keys, selected, sink_H, position_T[t : t + 1], inv_freq(ratio)
        )
        assert_near(whole[t : t + 1], alone, 2e-6)
    monkeypatch.setattr(attention, "TILE_BYTES", 1)
    one_by_one = ops.sparse_attention(q_THD, keys, selected_TK, sink_H, position_T, inv_freq(ratio))
    assert_near(one_by_one, whole, 2e-6)


@pytest.mark.parametrize("ratio", [0, 128])
def test_caches_are_left_as_they_are(ops: Ops, dtype: torch.dtype, ratio: int) -> None:
    keys = random_keys(ratio)
    before = keys.ring.data.clone()
    ops.sparse_attention(
        normal(2, 2, HEAD_DIM, seed=15, dtype=dtype),
        keys,
        None,
        torch.zeros(2),
        positions(5, 6),
        inv_freq(ratio),
    )
    assert torch.equal(keys.ring.data, before)
