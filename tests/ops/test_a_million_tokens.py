"""The ops at the end of 2^20 tokens: what is known without any of them, and values in float64."""

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, CompressorRing, KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import compressor as compressor_reference
from dsv4.ops.rope import layer_inv_freq
from tests.ops import forms
from tests.ops.cases import (
    EPS,
    HEAD_DIM,
    ROPE_DIM,
    WINDOW,
    OpsUnderTest,
    exact_rope,
    inv_freq,
    normal,
    tiny_config,
)
from tests.ops.compressor.cases import columns

pytestmark = pytest.mark.slow

CONTEXT = 1 << 20
CSA = 4
HCA = 128
# A decode step and a prefill step.
LENGTHS = (2, 10)
BF16 = torch.bfloat16


def cache(ratio: int, width: int, format: RowFormat) -> RowCache:
    """Room for a context of 2^20 tokens, and zeros."""
    slots = CONTEXT // ratio + 1
    device = torch.get_default_device()
    return RowCache.allocate(slots, width, ROPE_DIM, format, BF16, device)


@pytest.mark.parametrize("format", [RowFormat.INDEX_FP8, RowFormat.PLAIN])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_indexer_finds_entries_up_to_the_last_one_that_is_visible(
    ops: OpsUnderTest, format: RowFormat, tokens: int
) -> None:
    """One head looks at one column, in which all entries but a few are zero; of equal scores the
    lowest entries are taken.
    """
    keys = cache(CSA, 128, format)
    planted = torch.tensor([131_071, 262_140, 262_141, 262_142, 262_143])
    rows = torch.zeros(len(planted), 128)
    rows[:, 1] = torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0])
    keys.write(planted, rows)
    # The last slot has no entry before token 2^20 + 3, and holds NaN.
    keys.data.view(torch.uint8)[-1] = 0x7F
    q_TID = torch.zeros(tokens, 8, 128, dtype=BF16)
    q_TID[:, 3, 1] = 1
    position_T = torch.arange(CONTEXT - tokens, CONTEXT)
    found = ops.index_select(q_TID, torch.ones(tokens, 8), 0.5, keys, position_T, 512)
    for position, listed in zip(position_T.tolist(), found.tolist(), strict=True):
        best = [entry for entry in planted.tolist() if entry < (position + 1) // CSA]
        assert set(listed) == {*best, *range(512 - len(best))}, position


def exact_attention(
    q_THD: Tensor, keys: KeySet, seen_T: list[Tensor], sink_H: Tensor, position_T: Tensor
) -> Tensor:
    """In float64, of each token over its window and the entries ``seen_T[t]``."""
    assert keys.compressed is not None
    outputs = []
    for q_HD, entries, position in zip(q_THD.double(), seen_T, position_T.tolist(), strict=True):
        window = torch.arange(position - keys.window + 1, position + 1) % keys.ring.slots
        rows_ND = torch.cat([keys.ring.read(window), keys.compressed.read(entries)]).double()
        logits = torch.cat([q_HD @ rows_ND.T * HEAD_DIM**-0.5, sink_H.double()[:, None]], dim=1)
        mixed = torch.softmax(logits, dim=1)[:, :-1] @ rows_ND
        outputs.append(exact_rope(mixed, position, inv_freq(keys.ratio), inverse=True))
    return torch.stack(outputs)


@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_attention_reads_the_last_entries(ops: OpsUnderTest, ratio: int, tokens: int) -> None:
    compressed = cache(ratio, HEAD_DIM, RowFormat.KV_FP8)
    ring = RowCache.allocate(
        WINDOW + tokens + 8, HEAD_DIM, ROPE_DIM, RowFormat.KV_FP8, BF16, compressed.data.device
    )
    ring.write(torch.arange(ring.slots), normal(ring.slots, HEAD_DIM, seed=1))
    entries = CONTEXT // ratio
    some = torch.tensor([0, entries // 2, entries - 3, entries - 2, entries - 1])
    compressed.write(some, normal(len(some), HEAD_DIM, seed=2))
    compressed.data[-1] = 0x7F
    keys = KeySet(ring, compressed, ratio, WINDOW)
    position_T = torch.arange(CONTEXT - tokens, CONTEXT)
    complete_T = ((position_T + 1) // ratio).tolist()
    selected_TK = None
    if ratio == CSA:
        seen_T = [some[some < complete] for complete in complete_T]
        selected_TK = torch.full((tokens, 16), -1)
        for listed, seen in zip(selected_TK, seen_T, strict=True):
            listed[3 : 3 + len(seen)] = seen
    else:
        seen_T = [torch.arange(complete) for complete in complete_T]
    q_THD = normal(tokens, 4, HEAD_DIM, seed=3, dtype=BF16, scale=3.0)
    sink_H = normal(4, seed=4)
    frequencies = inv_freq(ratio)
    out = ops.sparse_attention(q_THD, keys, selected_TK, sink_H, position_T, frequencies)
    exact = exact_attention(q_THD, keys, seen_T, sink_H, position_T)
    assert float((out.double() - exact).norm() / exact.norm()) <= 5e-3


@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("tokens", [8, 130])
def test_the_compressor_writes_the_last_entry(backend: str, ratio: int, tokens: int) -> None:
    compress = forms.part(backend, compressor_reference.compress, forms.compress)
    width = 128
    rows = cache(ratio, width, RowFormat.PLAIN)
    rows.data.fill_(7.0)
    ring = CompressorRing.allocate(ratio, columns(ratio), rows.data.device)
    ring.kv.copy_(normal(*ring.kv.shape, seed=1))
    ring.score.copy_(normal(*ring.score.shape, seed=2))
    weights = compressor_reference.CompressorWeights(
        normal(ratio, columns(ratio), seed=3),
        normal(width, seed=4),
        inv_freq(ratio),
        EPS,
        ratio,
        rotate_keys=False,
        compute_dtype=BF16,
    )
    kv_TW, score_TW = (normal(tokens, columns(ratio), seed=seed) for seed in (5, 6))
    position_T = torch.arange(CONTEXT - tokens, CONTEXT)
    compress(kv_TW, score_TW, position_T, weights, CompressedState(ring, rows))
    first, last = (CONTEXT - tokens) // ratio, CONTEXT // ratio - 1
    written = (rows.data != 7.0).any(1).nonzero().flatten().tolist()
    assert written == list(range(first, last + 1))
    window = 2 * ratio if ratio == CSA else ratio
    if tokens < window:
        return
    kv, score = kv_TW[-window:].double(), score_TW[-window:].double()
    score = score + weights.ape.double().repeat(window // ratio, 1)
    if ratio == CSA:
        kv, score = (torch.cat((t[:ratio, :width], t[ratio:, width:])) for t in (kv, score))
    pooled = (torch.softmax(score, dim=0) * kv).sum(0)
    normed = pooled * (pooled.square().mean() + EPS) ** -0.5 * weights.norm.double()
    exact = exact_rope(normed, last * ratio, inv_freq(ratio))
    error = (rows.data[last].double() - exact).abs().max()
    # Rounded to bfloat16 after the pool, after the norm and after the rotation.
    assert float(error) <= 2**-6 * float(exact.abs().max())


@pytest.mark.parametrize("ratio", [0, CSA])
def test_angles_are_float32_products_within_3_hundredths_of_the_exact_ones(ratio: int) -> None:
    """Up to 2^24 positions are exact in float32; only the product is rounded (model.md#rope)."""
    frequencies = layer_inv_freq(tiny_config(), ratio)
    position_T = torch.tensor([CONTEXT - 1, CONTEXT - 2, 999_983])
    assert torch.equal(position_T.float().long(), position_T)
    angle = position_T.float()[:, None] * frequencies
    exact = position_T.double()[:, None] * frequencies.double()
    assert torch.equal(angle, exact.float())
    error = (angle.double() - exact).abs().max()
    assert float(error) <= 2**-5
    assert float(error) > 2**-8, "the bound says nothing"
    # The fastest pair turns by one radian a token: no rounding at all.
    assert torch.equal(angle[:, 0].double(), position_T.double())
