"""Compressor: pooling windows of tokens into rows, in any chunking, with drafts taken back."""

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.caches.rows import RowFormat, pack_kv_rows
from dsv4.ops.compressor import CompressorWeights
from tests.ops.cases import EPS, SUMMED, VECTORS, assert_near, exact_rope, exact_sylvester, normal
from tests.ops.compressor.cases import (
    RATIOS,
    ROPE,
    WIDTH,
    Compress,
    columns,
    empty_state,
    feed,
    projections,
    unit_norm,
    weights_for,
)

BOUNDARIES = (1, 2, 3, 4, 5, 7, 8, 9, 126, 127, 128, 129, 130, 254, 255, 256, 257)


def exact_pool(kv: Tensor, score: Tensor, ape: Tensor, ratio: int, m: int) -> Tensor:
    """Entry m before normalisation: one softmax per channel over the tokens of its window or
    windows, float64.
    """
    width = kv.shape[1] // 2 if ratio == 4 else kv.shape[1]
    terms = [(t, width if ratio == 4 else 0) for t in range(ratio * m, ratio * (m + 1))]
    if ratio == 4 and m > 0:
        terms += [(t, 0) for t in range(ratio * (m - 1), ratio * m)]
    biased = score.double() + ape.double()[torch.arange(score.shape[0]) % ratio]
    values = torch.stack([kv[t, c : c + width].double() for t, c in terms])
    logits = torch.stack([biased[t, c : c + width] for t, c in terms])
    shares = torch.exp(logits - logits.amax(0))
    return (shares * values).sum(0) / shares.sum(0)


def exact_entry(tokens: tuple[Tensor, Tensor], weights: CompressorWeights, m: int) -> Tensor:
    """The row before quantisation, rounded where model.md#compressor rounds."""
    dtype = weights.compute_dtype
    pooled = exact_pool(*tokens, weights.ape, weights.ratio, m).to(dtype).double()
    normed = pooled * (pooled.square().mean() + weights.norm_eps) ** -0.5 * weights.norm.double()
    row = exact_rope(normed.to(dtype), weights.ratio * m, weights.inv_freq).to(dtype).double()
    if weights.rotate_keys:
        row = row @ exact_sylvester(row.shape[-1]) * row.shape[-1] ** -0.5
    return row


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("rotate_keys", [False, True])
def test_entries_equal_the_formula(compress: Compress, ratio: int, rotate_keys: bool) -> None:
    weights = weights_for(ratio, rotate_keys)
    count = 3 * ratio + 1
    tokens = projections(count, ratio)
    state = empty_state(ratio, 5)
    feed(compress, state, tokens, 0, count, weights)
    for m in range(3):
        assert_near(state.rows.data[m], exact_entry(tokens, weights, m), SUMMED)
    assert bool(state.rows.data[3:].isnan().all()), "an incomplete entry was written"


def test_published_overlapping_pool(compress: Compress) -> None:
    case = VECTORS["csa_pool_d2"]
    kv, score = (torch.tensor(case[name]).reshape(8, 4) for name in ("kv_8x4", "score_8x4"))
    ape = torch.tensor(case["ape_4x4"]).reshape(4, 4)
    weights = CompressorWeights(ape, torch.ones(2), torch.ones(1), EPS, 4, False, torch.float32)
    state = empty_state(4, 2, width=2)
    feed(compress, state, (kv, score), 0, 8, unit_norm(weights, 2))
    assert state.rows.data[0].tolist() == pytest.approx(case["entry0"], abs=3e-7)
    assert state.rows.data[1].tolist() == pytest.approx(case["entry1"], abs=3e-7)


@pytest.mark.parametrize("ratio", RATIOS)
def test_lesson_05_the_positional_bias_is_in_the_softmax_only(
    compress: Compress, ratio: int
) -> None:
    """Equal contents pool to that content whatever the gate says, so no bias may have been added to
    it.
    """
    count = 2 * ratio
    _, score = projections(count, ratio)
    content = normal(columns(ratio), seed=1)
    content[-WIDTH:] = content[:WIDTH]
    state = empty_state(ratio, 2)
    feed(
        compress,
        state,
        (content.expand(count, -1), score),
        0,
        count,
        unit_norm(weights_for(ratio), WIDTH),
    )
    torch.testing.assert_close(state.rows.data, content[:WIDTH].expand(2, -1), rtol=2e-6, atol=1e-6)


def test_lesson_09_decoding_keeps_the_previous_window_of_overlapping_pools(
    compress: Compress,
) -> None:
    """Token by token, entry 1 still holds the first half of tokens 0 to 3."""
    weights = weights_for(4)
    tokens = projections(8, 4)
    state = empty_state(4, 2)
    for t in range(8):
        feed(compress, state, tokens, t, t + 1, weights)
    assert_near(state.rows.data[1], exact_entry(tokens, weights, 1), SUMMED)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("split", [0, 9], ids=["one_chunk", "two_chunks"])
def test_spec11_a04_every_entry_is_rotated_at_its_own_window(
    compress: Compress, ratio: int, split: int
) -> None:
    """Equal tokens pool to equal contents, so rows differ by rotation alone: entry m at position
    ratio · m.
    """
    weights = weights_for(ratio)
    count = 5 * ratio
    kv, score = (part[:1].expand(count, -1) for part in projections(1, ratio))
    state = empty_state(ratio, 5)
    for start, stop in ((0, split), (split, count)) if split else ((0, count),):
        feed(compress, state, (kv, score), start, stop, weights)
    raw = exact_rope(state.rows.data[1], ratio, weights.inv_freq, inverse=True)
    for m in range(1, 5):
        assert_near(state.rows.data[m], exact_rope(raw, ratio * m, weights.inv_freq), 3e-6)


def written_entries(state: CompressedState) -> list[bool]:
    return (~state.rows.data.isnan().any(1)).tolist()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("count", BOUNDARIES)
def test_spec11_b06_entries_appear_exactly_when_their_window_is_complete(
    compress: Compress, ratio: int, count: int
) -> None:
    weights = weights_for(ratio)
    tokens = projections(count, ratio)
    state = empty_state(ratio, count // ratio + 2)
    feed(compress, state, tokens, 0, count, weights)
    assert written_entries(state) == [m < count // ratio for m in range(count // ratio + 2)]


@pytest.mark.parametrize("ratio", RATIOS)
def test_spec11_b06_decoding_writes_an_entry_with_the_last_token_of_its_window(
    compress: Compress, ratio: int
) -> None:
    count = BOUNDARIES[-1]
    weights = weights_for(ratio)
    tokens = projections(count, ratio)
    state = empty_state(ratio, count // ratio + 2)
    for t in range(count):
        feed(compress, state, tokens, t, t + 1, weights)
        assert written_entries(state) == [
            m < (t + 1) // ratio for m in range(count // ratio + 2)
        ], f"token {t}"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    "format", [RowFormat.PLAIN, RowFormat.KV_FP8], ids=lambda format: format.value
)
def test_spec11_b07_tokens_inside_a_window_touch_no_slot(
    compress: Compress, ratio: int, format: RowFormat
) -> None:
    """Slot 0 included, where a masked write to a clamped index would land."""
    weights = weights_for(ratio)
    tokens = projections(2 * ratio, ratio)
    state = empty_state(ratio, 3, format)
    feed(compress, state, tokens, 0, ratio, weights)
    before = state.rows.data.clone().view(torch.uint8)
    for t in range(ratio, 2 * ratio - 1):
        feed(compress, state, tokens, t, t + 1, weights)
        assert torch.equal(state.rows.data.view(torch.uint8), before), f"token {t} changed a row"


@pytest.mark.parametrize("ratio", RATIOS)
def test_bfloat16_rows_round_where_the_spec_rounds(compress: Compress, ratio: int) -> None:
    """Pooled value, norm and rotation each round to bfloat16 once, then the row is quantised."""
    weights = weights_for(ratio, compute_dtype=torch.bfloat16)
    count = 4 * ratio
    tokens = projections(count, ratio)
    state = empty_state(ratio, 4, RowFormat.KV_FP8)
    feed(compress, state, tokens, 0, count, weights)
    exact = torch.stack([exact_entry(tokens, weights, m) for m in range(4)])
    data, block_scale = pack_kv_rows(exact.to(torch.bfloat16), ROPE)
    # Found: 0 bytes, on the CPU.
    different = int((state.rows.data != data).sum())
    assert different <= data.numel() // 50, "only a few float32 results may round the other way"
    assert state.rows.block_scale is not None
    assert int((state.rows.block_scale != block_scale).sum()) <= 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_index_keys_are_rounded_before_the_hadamard_rotation(
    compress: Compress, ratio: int
) -> None:
    """Keys that are not rounded between the rotations differ in 20 % of their values."""
    weights = weights_for(ratio, rotate_keys=True, compute_dtype=torch.bfloat16)
    count = 4 * ratio
    tokens = projections(count, ratio)
    state = empty_state(ratio, 4, dtype=torch.bfloat16)
    feed(compress, state, tokens, 0, count, weights)
    exact = torch.stack([exact_entry(tokens, weights, m) for m in range(4)])
    # Found: 0 values, on the CPU.
    different = int((state.rows.data != exact.to(torch.bfloat16)).sum())
    assert different <= exact.numel() // 50, "only a few float32 results may round the other way"


def test_infinite_scores_of_one_token_take_the_whole_pool(compress: Compress) -> None:
    """A gate of 1e30 makes one token the entry; float32 softmax subtracts the maximum and stays
    finite.
    """
    tokens = projections(4, 4)
    state = empty_state(4, 1)
    tokens[1][2] = 1e30
    feed(compress, state, tokens, 0, 4, unit_norm(weights_for(4), WIDTH))
    torch.testing.assert_close(state.rows.data[0], tokens[0][2, WIDTH:], rtol=1e-6, atol=0)
