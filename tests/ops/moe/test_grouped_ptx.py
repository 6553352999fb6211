"""The grouped products of a prompt's experts, executed on the CPU as Hopper and other GPUs have
them: every tile, against float64 and against each other bit for bit.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear.prefill import FEW, MODE_GATE_UP, NARROW, SOME, WIDE, Tile
from dsv4.ops.moe import grouped, sorted_pairs
from dsv4.ops.moe.grouped import down, gate_up
from dsv4.ops.moe.sorted_pairs import sort_by_expert
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.executed import execute

# With the consumer warps of small tiles.
BUILDS = [
    ("sm_90a", 8, QuantFormat.NVFP4),
    ("sm_90a", 8, QuantFormat.FP8_BLOCK128),
    ("sm_90a", 12, QuantFormat.MXFP4),
    ("sm_90a", 12, QuantFormat.BF16),
    ("sm_100a", 12, QuantFormat.NVFP4),
    ("sm_100a", 12, QuantFormat.MXFP4),
    ("sm_100a", 12, QuantFormat.FP8_BLOCK128),
    ("sm_100a", 12, QuantFormat.BF16),
]
LIMIT = 10.0
TOKENS, PER_TOKEN, EXPERTS = 75, 2, 4
WIDTH = 192
# Inner widths whose rows fill blocks of 8 warps alone, and of 12.
INNER = {8: 128, 12: 192}
# Average pairs of an expert up to which tiles are small, and what tile that makes.
LIMITS = {FEW: (1000, 1000), SOME: (0, 1000), NARROW: (0, 0)}


# Of the experts: they make tiles of every width that is multiplied, and one pair is of none.
PAIRS = (40, 70, 25, 14)


def chosen(generator: torch.Generator) -> Tensor:
    """Ids ``[T, P]``."""
    ids = [expert for expert, pairs in enumerate(PAIRS) for _ in range(pairs)]
    ids += [-1] * (TOKENS * PER_TOKEN - len(ids))
    order = torch.randperm(len(ids), generator=generator)
    return torch.tensor(ids)[order].view(TOKENS, PER_TOKEN)


def results(
    architecture: str, x: Tensor, weights: list[QuantTensor], ids_TP: Tensor, routing: Tensor
) -> Tensor:
    """Products ``[T·P, E]``, NaN where none is stored."""
    recording = Recording(Target(torch.device("cpu"), architecture, 3), TOKENS)
    w1, w2, w3 = map(pack_weight, weights)
    pairs = sort_by_expert(recording, ids_TP, EXPERTS, finely=True)
    hidden = gate_up(recording, x, w1, w3, LIMIT, pairs, routing)
    products = down(recording, hidden, w2, pairs)
    return execute(recording, TOKENS)(products)


def reference(x: Tensor, weights: list[QuantTensor], ids_TP: Tensor, routing: Tensor) -> Tensor:
    """float64, with the hidden rows rounded as they are."""
    w1, w2, w3 = (weight.dequantize().double() for weight in weights)
    found = torch.full((ids_TP.numel(), WIDTH), torch.nan, dtype=torch.float64)
    for pair, expert in enumerate(ids_TP.flatten().tolist()):
        if expert >= 0:
            row = x[pair // PER_TOKEN].double()
            gate = (w1[expert] @ row).clamp(max=LIMIT)
            up = (w3[expert] @ row).clamp(-LIMIT, LIMIT)
            hidden = torch.nn.functional.silu(gate) * up * routing.flatten()[pair].double()
            found[pair] = w2[expert] @ hidden.bfloat16().double()
    return found


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "consumers", "format"), BUILDS, ids=str)
def test_every_tile_gives_the_same_bits(
    architecture: str, consumers: int, format: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = INNER[consumers]
    assert FEW.fitting(MODE_GATE_UP, inner).consumers == consumers
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    shapes = ((EXPERTS, inner, WIDTH), (EXPERTS, WIDTH, inner), (EXPERTS, inner, WIDTH))
    weights = [quantize(torch.randn(shape, generator=generator) * 0.2, format) for shape in shapes]
    routing = torch.rand(TOKENS, PER_TOKEN, generator=generator)
    ids_TP = chosen(generator)
    found = {}
    for tile, (few, some) in LIMITS.items():
        monkeypatch.setattr(sorted_pairs, "_FEW_PAIRS", few)
        monkeypatch.setattr(sorted_pairs, "_SOME_PAIRS", some)
        grouped.by_tokens.cache_clear()
        assert sorted_pairs.Cut(PER_TOKEN, EXPERTS, finely=True).tiling(TOKENS).tile == tile
        found[tile] = results(architecture, x, weights, ids_TP, routing)
    grouped.by_tokens.cache_clear()
    expected = reference(x, weights, ids_TP, routing)
    first = found[NARROW].double()
    assert torch.equal(first.isnan(), expected.isnan()), "where no expert is, nothing is stored"
    error = (first - expected).nan_to_num().norm() / expected.nan_to_num().norm()
    assert float(error) < 1e-3
    for tile, products in found.items():
        assert torch.equal(products.nan_to_num(), found[NARROW].nan_to_num()), tile


@pytest.mark.parametrize(
    ("rows", "expected"),
    # Inner rows of Flash whole, as a rank of 2, 4 and 8, and of Pro.
    [(2048, 12), (1024, 8), (512, 8), (256, 8), (3072, 12), (1536, 12), (768, 12), (384, 12)],
)
def test_blocks_are_not_left_idle(rows: int, expected: int) -> None:
    for tile in (FEW, SOME):
        assert tile.fitting(MODE_GATE_UP, rows).consumers == expected
    for whole in (NARROW, WIDE):
        assert whole.fitting(MODE_GATE_UP, rows) == whole


def test_a_tile_keeps_its_tokens() -> None:
    assert [tile.fitting(MODE_GATE_UP, 256) for tile in (FEW, SOME)] == [Tile(32, 8), Tile(64, 8)]
