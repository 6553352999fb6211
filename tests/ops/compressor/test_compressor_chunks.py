"""Compressor: any chunking, drafts taken back and new sequences give the same bytes."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4.caches.layer import CompressorRing, history_tokens
from dsv4.caches.rows import RowFormat
from dsv4.ops.compressor import compress as torch_compress
from tests.ops.compressor.cases import RATIOS, Compress, empty_state, feed, projections, weights_for


def rows_after(compress: Compress, chunks: list[int], ratio: int, format: RowFormat) -> Tensor:
    count = sum(chunks)
    weights = weights_for(ratio)
    tokens = projections(count, ratio)
    state = empty_state(ratio, count // ratio + 1, format)
    for start, stop in pairwise(accumulate(chunks, initial=0)):
        feed(compress, state, tokens, start, stop, weights)
    return state.rows.data.view(torch.uint8)


@pytest.mark.parametrize("ratio", RATIOS)
@given(
    chunks=st.lists(st.integers(1, 150) | st.integers(1, 9), min_size=1, max_size=8).filter(
        lambda c: sum(c) <= 300
    )
)
def test_any_chunking_gives_the_same_bytes_as_one_shot(ratio: int, chunks: list[int]) -> None:
    one_shot = rows_after(torch_compress, [sum(chunks)], ratio, RowFormat.PLAIN)
    assert torch.equal(rows_after(torch_compress, chunks, ratio, RowFormat.PLAIN), one_shot)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("step", [1, 3, 7, 64, 127, 129])
@pytest.mark.parametrize(
    "format", [RowFormat.PLAIN, RowFormat.KV_FP8], ids=lambda format: format.value
)
def test_equal_chunks_give_the_same_bytes_as_one_shot(
    compress: Compress, ratio: int, step: int, format: RowFormat
) -> None:
    chunks = [min(step, 300 - start) for start in range(0, 300, step)]
    assert torch.equal(
        rows_after(compress, chunks, ratio, format), rows_after(compress, [300], ratio, format)
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("start", [1, 3, 4, 5, 6, 7, 120, 127, 128, 251])
@pytest.mark.parametrize(("drafted", "accepted"), [(8, 0), (8, 3), (5, 4), (1, 0)])
def test_a_rejected_draft_can_be_taken_back(
    compress: Compress, ratio: int, start: int, drafted: int, accepted: int
) -> None:
    """Draft tokens are fed in one step, all but the accepted ones are replaced: rows as if they had
    never been.
    """
    count = start + accepted + ratio + 8
    weights = weights_for(ratio)
    tokens = projections(count, ratio)
    wrong = projections(count + 8, ratio, seed=900)
    state = empty_state(ratio, count // ratio + 9)
    straight = empty_state(ratio, count // ratio + 9)
    feed(compress, state, tokens, 0, start, weights)
    draft = tuple(
        torch.cat((right[: start + accepted], other[start + accepted :]))
        for right, other in zip(tokens, wrong, strict=True)
    )
    feed(compress, state, (draft[0], draft[1]), start, start + drafted, weights)
    feed(compress, straight, tokens, 0, count, weights)
    resumed = start + accepted
    for first, last in ((resumed, resumed + 1), (resumed + 1, resumed + 4), (resumed + 4, count)):
        feed(compress, state, tokens, first, last, weights)
    assert torch.equal(state.rows.data[: count // ratio], straight.rows.data[: count // ratio])


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("junk", [1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("first", [1, 3, 300])
def test_a_new_sequence_sees_nothing_of_an_earlier_one(
    compress: Compress, ratio: int, junk: float, first: int
) -> None:
    """A ring full of anything, NaN included, gives the rows of a fresh ring."""
    weights = weights_for(ratio)
    tokens = projections(300, ratio)
    states = [empty_state(ratio, 80, junk=value) for value in (junk, 0.0)]
    for state in states:
        feed(compress, state, tokens, 0, first, weights)
        for start in range(first, 300, 9):
            feed(compress, state, tokens, start, min(start + 9, 300), weights)
    assert torch.equal(states[0].rows.data[: 300 // ratio], states[1].rows.data[: 300 // ratio])


@pytest.mark.parametrize(("ratio", "slots"), [(4, 19), (128, 139)])
def test_ring_holds_the_history_and_the_longest_draft(ratio: int, slots: int) -> None:
    ring = CompressorRing.allocate(ratio, 32, torch.device("cpu"))
    assert ring.kv.shape == ring.score.shape == (slots, 32)
    assert ring.kv.dtype == ring.score.dtype == torch.float32
    assert ring.nbytes == 2 * slots * 32 * 4
    assert history_tokens(ratio) == slots - 11
