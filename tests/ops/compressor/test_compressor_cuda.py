"""CUDA compressor over the real shapes, against the torch op on the same device."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, CompressorRing, history_tokens
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import compressor as reference
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.immediate import PreparedOp, immediately
from tests.ops import forms
from tests.ops.cases import EPS, inv_freq, normal
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager

pytestmark = pytest.mark.gpu
compress = immediately(forms.compress)

# ratio, width of a row, format: the main compressors of both kinds, the indexer's, and plain rows.
SHAPES = {
    "csa": (4, 512, RowFormat.KV_FP8),
    "index": (4, 128, RowFormat.INDEX_FP8),
    "hca": (128, 512, RowFormat.KV_FP8),
    "csa_plain": (4, 512, RowFormat.PLAIN),
    "index_plain": (4, 128, RowFormat.PLAIN),
    "hca_plain": (128, 512, RowFormat.PLAIN),
    "narrow_csa": (4, 96, RowFormat.KV_FP8),
    "narrow_hca": (128, 96, RowFormat.KV_FP8),
}
EDGES = (
    0,
    3,
    4,
    7,
    8,
    120,
    121,
    127,
    128,
    129,
    251,
    255,
    256,
    511,
    512,
    1_048_560,
    1_048_571,
    1_048_575,
)


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def columns(ratio: int, width: int) -> int:
    return 2 * width if ratio == 4 else width


def weights_for(name: str) -> CompressorWeights:
    ratio, width, _ = SHAPES[name]
    ape = normal(ratio, columns(ratio, width), seed=1)
    norm = 1 + 0.1 * normal(width, seed=2)
    rotate = name.startswith("index")
    return CompressorWeights(ape, norm, inv_freq(ratio), EPS, ratio, rotate, torch.bfloat16)


def state_for(name: str, entries: int, seed: int = 3) -> CompressedState:
    """Random ring, rows of bytes 0x7F: what an earlier sequence may have left."""
    ratio, width, format = SHAPES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    ring = CompressorRing.allocate(ratio, columns(ratio, width), device)
    ring.kv.copy_(normal(*ring.kv.shape, seed=seed))
    ring.score.copy_(normal(*ring.score.shape, seed=seed + 1))
    rows = RowCache.allocate(entries, width, 64, format, torch.bfloat16, device)
    rows.data.view(torch.uint8).fill_(0x7F)
    if rows.block_scale is not None:
        rows.block_scale.view(torch.uint8).fill_(0x7F)
    return CompressedState(ring, rows)


def twin(state: CompressedState) -> CompressedState:
    ring = state.ring
    rows = state.rows
    scale = None if rows.block_scale is None else rows.block_scale.clone()
    copy = RowCache(rows.data.clone(), scale, rows.format, rows.width, rows.rope_width)
    return CompressedState(CompressorRing(ring.kv.clone(), ring.score.clone()), copy)


def buffers(state: CompressedState) -> list[Tensor]:
    parts = [state.ring.kv, state.ring.score, state.rows.data, state.rows.block_scale]
    return [part for part in parts if part is not None]


def projections(tokens: int, name: str, seed: int = 5) -> tuple[Tensor, Tensor]:
    width = columns(*SHAPES[name][:2])
    return normal(tokens, width, seed=seed), normal(tokens, width, seed=seed + 1, scale=2.0)


def assert_same_state(found: CompressedState, expected: CompressedState) -> None:
    """Equal rings; rows equal but for roundings to bfloat16 and fp8 that fell the other way."""
    assert torch.equal(found.ring.kv, expected.ring.kv)
    assert torch.equal(found.ring.score, expected.ring.score)
    one = found.rows.data.view(torch.uint8)
    two = expected.rows.data.view(torch.uint8)
    written = (two != 0x7F).any(1)
    assert bool((one[~written] == 0x7F).all()), "a row was written that is not complete"
    if not bool(written.any()):
        return
    different = float((one[written] != two[written]).float().mean())
    assert different < 0.04, f"{different:.4f} of the bytes differ"
    one, two = (state.rows.read(written.nonzero().flatten()) for state in (found, expected))
    error = (one - two).abs() - 0.14 * two.abs() - 2**-6 * two.abs().amax(1, keepdim=True)
    worst = int(error.amax(1).argmax())
    assert float(error.max()) <= 0, f"entry {worst}: {one[worst][:8]} instead of {two[worst][:8]}"


def both(name: str, start: int, tokens: int, state: CompressedState) -> None:
    weights = weights_for(name)
    other = twin(state)
    kv_TW, score_TW = projections(tokens, name, seed=10 + start % 97)
    position_T = torch.arange(start, start + tokens)
    compress(kv_TW, score_TW, position_T, weights, state)
    reference.compress(kv_TW, score_TW, position_T, weights, other)
    assert_same_state(state, other)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
def test_decode_at_every_boundary(name: str, tokens: int) -> None:
    for start in EDGES:
        both(name, start, tokens, state_for(name, (start + tokens) // SHAPES[name][0] + 1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [9, 10, 16, 17, 127, 128, 129, 136, 137, 1000])
def test_longer_steps(name: str, tokens: int) -> None:
    for start in (0, 1, 7, 127, 130, 255, 4090):
        both(name, start, tokens, state_for(name, (start + tokens) // SHAPES[name][0] + 1))


@pytest.mark.parametrize("name", ["csa", "index", "hca"])
def test_a_whole_chunk(name: str) -> None:
    both(name, 0, 8192, state_for(name, 8192 // SHAPES[name][0] + 1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "chunks", [[1] * 520, [8] * 65, [3, 5, 200, 1, 1, 8, 7, 40, 255], [300, *[1] * 220]]
)
def test_any_chunking_gives_the_same_bytes(name: str, chunks: list[int]) -> None:
    weights = weights_for(name)
    kv_TW, score_TW = projections(520, name)
    one_shot, state = (state_for(name, 520 // SHAPES[name][0] + 1, seed) for seed in (3, 30))
    position_T = torch.arange(520)
    compress(kv_TW, score_TW, position_T, weights, one_shot)
    for start, stop in pairwise(accumulate(chunks, initial=0)):
        compress(kv_TW[start:stop], score_TW[start:stop], position_T[start:stop], weights, state)
    entries = 520 // SHAPES[name][0]
    for found, expected in zip(buffers(state)[2:], buffers(one_shot)[2:], strict=True):
        assert torch.equal(found[:entries].view(torch.uint8), expected[:entries].view(torch.uint8))
    kept = history_tokens(SHAPES[name][0]) + 11
    slots = torch.arange(520 - kept, 520) % kept
    assert torch.equal(state.ring.score[slots], one_shot.ring.score[slots])


@pytest.mark.parametrize("name", ["csa", "index", "hca"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_columns_of_a_wider_tensor(name: str, tokens: int) -> None:
    weights = weights_for(name)
    state = state_for(name, 70)
    kv_TW, score_TW = projections(tokens, name)
    wide = torch.cat(
        (normal(tokens, 24, seed=8), kv_TW, score_TW, normal(tokens, 8, seed=9)), dim=1
    )
    width = kv_TW.shape[1]
    position_T = torch.arange(127, 127 + tokens)
    other = twin(state)
    compress(
        wide[:, 24 : 24 + width], wide[:, 24 + width : 24 + 2 * width], position_T, weights, state
    )
    compress(kv_TW, score_TW, position_T, weights, other)
    for found, expected in zip(buffers(state), buffers(other), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["csa", "index", "hca"])
@pytest.mark.parametrize(("start", "tokens"), [(127, 1), (126, 1), (120, 8), (100, 60)])
def test_replay_equals_the_eager_call(name: str, start: int, tokens: int) -> None:
    weights = weights_for(name)
    state = state_for(name, 50)
    position_T = torch.arange(start, start + tokens)
    kv_TW, score_TW = projections(tokens, name)
    op = PreparedOp(forms.compress, kv_TW, score_TW, position_T, weights, state)
    assert_replay_is_eager(op.run, buffers(state))
    assert_no_synchronisation(op.run)


@pytest.mark.parametrize("name", ["csa", "index", "hca"])
@pytest.mark.parametrize("tokens", [9, 130, 299, 300])
def test_a_recording_serves_shorter_chunks_with_the_same_bytes(name: str, tokens: int) -> None:
    weights = weights_for(name)
    state = state_for(name, 120)
    position_T = torch.arange(100, 400)
    kv_TW, score_TW = projections(300, name)
    other = twin(state)
    PreparedOp(forms.compress, kv_TW, score_TW, position_T, weights, state).run(tokens)
    compress(kv_TW[:tokens], score_TW[:tokens], position_T[:tokens], weights, other)
    for found, expected in zip(buffers(state), buffers(other), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_wrong_arguments() -> None:
    weights = weights_for("csa")
    state = state_for("csa", 4)
    kv_TW, score_TW = projections(2, "csa")
    with pytest.raises(ValueError, match=r"kv_TW: found torch\.bfloat16"):
        compress(kv_TW.bfloat16(), score_TW, torch.arange(2), weights, state)
    with pytest.raises(ValueError, match="score_TW: found"):
        compress(kv_TW, score_TW[:1], torch.arange(2), weights, state)
    with pytest.raises(ValueError, match="positions_T: found"):
        compress(kv_TW, score_TW, torch.arange(2, dtype=torch.int32), weights, state)
