"""Grouped GEMM mixture of experts on the GPU against the torch op on the same packed weights."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import prefill as linear_prefill
from dsv4.ops.linear.prefill import FEW, NARROW, SOME, Tile
from dsv4.ops.moe import ExpertWeights, expert_sum, grouped, prefill, sorted_pairs
from dsv4.ops.router import Router
from dsv4.ops.router.prefill import route
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison, relative_error
from tests.ops.instruction_sets import INSTRUCTION_SETS, use_instructions

pytestmark = pytest.mark.gpu
moe_prefill = immediately(prefill.expert_sum)
FORMATS = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16]
LIMIT = 10.0


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_instructions(request.param, monkeypatch, linear_prefill, grouped)


def random(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def stack(
    experts: int | None, width: int, inner: int, format: QuantFormat, seed: int
) -> tuple[ExpertWeights, ...]:
    """Stored and packed expert weights; ``experts`` None: one without the leading dimension."""
    lead = () if experts is None else (experts,)
    shapes = ((*lead, inner, width), (*lead, width, inner), (*lead, inner, width))
    stored = [
        quantize(torch.randn(shape, generator=random(seed + i), device="cuda") * 0.2, format)
        for i, shape in enumerate(shapes)
    ]
    return ExpertWeights(*stored), ExpertWeights(*map(pack_weight, stored))


def inputs(
    tokens: int, width: int, experts: int, per_token: int, skew: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, width, generator=random(1), device="cuda").bfloat16()
    scores = torch.rand(tokens, experts, generator=random(2), device="cuda")
    scores[:, : experts // 4] += skew
    ids = scores.topk(per_token, dim=1).indices
    weights = torch.rand(tokens, per_token, generator=random(3), device="cuda")
    return x, ids, weights


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Hidden rows may round differently where float32 sums differ: 0.2 % of the norm; no row may
    stand out.
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    rows = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    worst = int(rows.nan_to_num(torch.inf).argmax())
    assert float(rows[worst]) < 5e-3, (
        f"relative error {relative_error(found, expected):.3g}, "
        f"worst row {worst}: {float(rows[worst]):.3g}, "
        f"{int((rows > 5e-3).sum())} rows wrong, {int(found.isnan().any(1).sum())} with NaN"
    )
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "per_token", "skew"),
    [
        (9, 64, 32, 8, 2, 0.0),
        (100, 256, 128, 16, 6, 0.5),
        (513, 512, 384, 8, 6, 0.0),
        (300, 1024, 512, 64, 6, 0.7),
    ],
)
def test_moe(
    format: QuantFormat,
    tokens: int,
    width: int,
    inner: int,
    experts: int,
    per_token: int,
    skew: float,
) -> None:
    stored, packed = stack(experts, width, inner, format, 10)
    stored_shared, packed_shared = stack(None, width, inner, QuantFormat.FP8_BLOCK128, 20)
    x, ids, weights = inputs(tokens, width, experts, per_token, skew)
    poison(1 << 20)
    found = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    assert_same(found, expert_sum(x, ids, weights, stored, stored_shared, LIMIT))


@pytest.mark.parametrize("tokens", [16, 1024])
def test_flash_width(tokens: int) -> None:
    stored, packed = stack(24, 4096, 2048, QuantFormat.NVFP4, 30)
    stored_shared, packed_shared = stack(None, 4096, 2048, QuantFormat.NVFP4, 40)
    x, ids, weights = inputs(tokens, 4096, 24, 6)
    x *= 0.1
    poison(64 << 20)
    found = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    assert_same(found, expert_sum(x, ids, weights, stored, stored_shared, LIMIT))


def test_odd_sizes_duplicates_and_ids_that_are_no_expert() -> None:
    stored, packed = stack(5, 36, 20, QuantFormat.BF16, 50)
    stored_shared, packed_shared = stack(None, 36, 28, QuantFormat.BF16, 60)
    x, ids, weights = inputs(50, 36, 5, 3)
    ids[7] = 2
    poison(1 << 20)
    found = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    assert_same(found, expert_sum(x, ids, weights, stored, stored_shared, LIMIT))
    weights[5, 1] = 0.0
    expected = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    ids[5, 1] = -1
    weights[5, 1] = torch.nan
    assert torch.equal(moe_prefill(x, ids, weights, packed, packed_shared, LIMIT), expected)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(("tokens", "tile"), [(40, FEW), (120, SOME)])
def test_small_tiles_do_not_change_the_result(
    format: QuantFormat, tokens: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts with more pairs than such a tile too; a token's bits depend on no other token."""
    _, packed = stack(16, 256, 448, format, 80)
    _, packed_shared = stack(None, 256, 448, format, 90)
    operands = inputs(tokens, 256, 16, 6, skew=0.9)
    assert int(operands[1].flatten().bincount().max()) > tile.tokens
    assert sorted_pairs.Cut(6, 16, finely=True).tiling(tokens).tile == tile
    found = moe_prefill(*operands, packed, packed_shared, LIMIT)
    monkeypatch.setattr(sorted_pairs, "_SOME_PAIRS", 0)
    sorted_pairs.by_tokens.cache_clear()
    assert sorted_pairs.Cut(6, 16, finely=True).tiling(tokens).tile == NARROW
    assert torch.equal(moe_prefill(*operands, packed, packed_shared, LIMIT), found)
    sorted_pairs.by_tokens.cache_clear()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(("tokens", "skew"), [(150, 0.0), (400, 0.7)])
def test_boxes_do_not_change_the_result(
    format: QuantFormat, tokens: int, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that TMA copies in the order of the experts, in tiles of every width."""
    _, packed = stack(8, 256, 448, format, 80)
    _, packed_shared = stack(None, 256, 448, QuantFormat.FP8_BLOCK128, 90)
    operands = inputs(tokens, 256, 8, 6, skew)
    found = moe_prefill(*operands, packed, packed_shared, LIMIT)
    monkeypatch.setattr(grouped, "takes_boxes", lambda *_: False)
    assert torch.equal(moe_prefill(*operands, packed, packed_shared, LIMIT), found)


def test_parts_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = stack(16, 256, 128, QuantFormat.MXFP4, 70)
    _, packed_shared = stack(None, 256, 128, QuantFormat.MXFP4, 80)
    x, ids, weights = inputs(700, 256, 16, 6)
    whole = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    monkeypatch.setattr(prefill, "_WORKSPACE_BYTES", 256 * 6 * 1500)
    parts = moe_prefill(x, ids, weights, packed, packed_shared, LIMIT)
    assert relative_error(parts, whole) < 1e-3


def test_a_recording_of_the_longest_chunk_serves_shorter_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routed, and in parts of 256 tokens: what the launches of a chunk of that length compute."""
    monkeypatch.setattr(prefill, "_WORKSPACE_BYTES", 256 * 6 * 1500)
    _, experts = stack(16, 256, 128, QuantFormat.NVFP4, 110)
    _, shared = stack(None, 256, 128, QuantFormat.FP8_BLOCK128, 120)
    x, _, _ = inputs(700, 256, 16, 6)
    gate = pack_weight(
        QuantTensor.dense(torch.randn(16, 256, generator=random(5), device="cuda").bfloat16())
    )
    router = Router(gate, torch.zeros(16, device="cuda"), False, 6, 1.5)
    token_ids = torch.zeros(700, dtype=torch.int64, device="cuda")
    op = PreparedOp(prefill.moe, x, token_ids, router, experts, shared, LIMIT)
    for tokens in (700, 9, 257, 256, 600, 700):
        ids, weights = immediately(route)(x[:tokens], token_ids[:tokens], router)
        expected = moe_prefill(x[:tokens], ids, weights, experts, shared, LIMIT)
        assert torch.equal(op.run(tokens).y_TE[:tokens], expected)


def test_replay_repetition_and_no_synchronisation() -> None:
    _, packed = stack(16, 256, 128, QuantFormat.NVFP4, 90)
    _, packed_shared = stack(None, 256, 128, QuantFormat.FP8_BLOCK128, 100)
    x, ids, weights = inputs(200, 256, 16, 6)
    op = PreparedOp(prefill.expert_sum, x, ids, weights, packed, packed_shared, LIMIT)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token"), [(9, 8, 2), (777, 256, 6), (7000, 384, 6), (100, 1024, 16)]
)
def test_sort(tokens: int, experts: int, per_token: int) -> None:
    """The stable order of torch, and tiles that cover every pair once in ascending expert order."""
    ids = torch.randint(0, experts, (tokens, per_token), generator=random(4), device="cuda")
    found = immediately(sorted_pairs.sort_by_expert)(ids, experts)
    flat = ids.flatten()
    assert torch.equal(found.slots.long(), flat.argsort(stable=True))
    expected = []
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
        expected += [[expert, start + i, min(128, count - i), 0] for i in range(0, count, 128)]
        start += count
    assert int(found.tile_count) == len(expected)
    assert found.tiles[: len(expected)].tolist() == expected
