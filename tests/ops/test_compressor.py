"""Compressor: pooling windows of tokens into rows, in any chunking."""

import pytest
import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressedState, CompressorRing, CompressorWeights
from tests.ops.cases import EPS, assert_near, exact_rope, inv_freq, normal

WIDTH, ROPE = 128, 64


def weights_for(ratio: int, rotate_keys: bool = False) -> CompressorWeights:
    columns = 2 * WIDTH if ratio == 4 else WIDTH
    ape, norm = normal(ratio, columns, seed=100), normal(WIDTH, seed=101)
    return CompressorWeights(ape, norm, inv_freq(ratio), EPS, ratio, rotate_keys, torch.float32)


def empty_state(ratio: int, slots: int, fill: float = torch.nan) -> CompressedState:
    device = torch.get_default_device()
    rows = RowCache.allocate(slots, WIDTH, ROPE, RowFormat.PLAIN, torch.float32, device)
    rows.data.fill_(fill)
    return CompressedState(CompressorRing.allocate(ratio, 2 * WIDTH if ratio == 4 else WIDTH, device), rows)


def projections(tokens: int, ratio: int) -> tuple[Tensor, Tensor]:
    columns = 2 * WIDTH if ratio == 4 else WIDTH
    return normal(tokens, columns, seed=102), normal(tokens, columns, seed=103)


def feed(ops: Ops, state: CompressedState, kv: Tensor, score: Tensor, start: int, stop: int, w: CompressorWeights):
    ops.compress(kv[start:stop], score[start:stop], torch.arange(start, stop), w, state)


def exact_pool(kv: Tensor, score: Tensor, ape: Tensor, ratio: int, m: int) -> Tensor:
    """Entry m before normalisation, channel by channel in float64."""
    width = kv.shape[1] // 2 if ratio == 4 else kv.shape[1]
    terms = [(t, width if ratio == 4 else 0) for t in range(ratio * m, ratio * (m + 1))]
    if ratio == 4 and m > 0:
        terms += [(t, 0) for t in range(ratio * (m - 1), ratio * m)]
    values = torch.stack([kv[t, c : c + width].double() for t, c in terms])
    logits = torch.stack(
        [(score[t, c : c + width].double() + ape[t % ratio, c : c + width].double()) for t, c in terms]
    )
    shares = torch.exp(logits - logits.amax(0))
    return (shares * values).sum(0) / shares.sum(0)


def exact_entry(kv: Tensor, score: Tensor, w: CompressorWeights, m: int) -> Tensor:
    pooled = exact_pool(kv, score, w.ape, w.ratio, m)
    normed = pooled * (pooled.square().mean() + w.norm_eps) ** -0.5 * w.norm.double()
    return exact_rope(normed, w.ratio * m, w.inv_freq)


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_equal_the_formula(ops: Ops, ratio: int) -> None:
    w, tokens = weights_for(ratio), 3 * ratio + 1
    kv, score = projections(tokens, ratio)
    state = empty_state(ratio, 5)
    feed(ops, state, kv, score, 0, tokens, w)
    for m in range(3):
        assert_near(state.rows.data[m], exact_entry(kv, score, w, m), 2e-6)
    assert bool(state.rows.data[3:].isnan().all()), "an incomplete entry was written"
