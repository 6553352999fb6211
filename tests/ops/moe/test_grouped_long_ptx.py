"""The grouped products of long steps by TMA, executed on the CPU: bit for bit those of shorter
steps, which tests/ops/moe/test_grouped_ptx.py compares with float64.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear.prefill import LARGE, NARROW, WIDE, Tile
from dsv4.ops.moe import grouped
from dsv4.ops.moe.grouped import down, gate_up, sort_pairs
from dsv4.ops.moe.sorted_pairs import Cut
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from dsv4.weights.quantize import quantize
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit
from tests.shared_results import shared

pytestmark = pytest.mark.slow

NVFP4, MXFP4 = QuantFormat.NVFP4, QuantFormat.MXFP4
FP8, BF16 = QuantFormat.FP8_BLOCK128, QuantFormat.BF16
LIMIT = 10.0
WIDTH, INNER = 128, 96
FAULTS = {
    "every expert is the first one": SourceEdit(
        "prefill_long_sm90.cu", "t.expert * g.row_tiles + first", "first"
    ),
    "up is gate": SourceEdit(
        "prefill_long_sm90.cu", "*maps.weight[i / MATRIX_TILES]", "*maps.weight[0]"
    ),
    "two warps have the same rows": SourceEdit(
        "prefill_wgmma.cuh", "a[0][2 + i], s, warp % 2", "a[0][2 + i], s, 0"
    ),
    "rows are those of other tokens": SourceEdit(
        "gather_rows.cu", "slots[pair] / per_token", "slots[pair] % per_token"
    ),
    "the last rows are not gathered": SourceEdit("gather_rows.cu", "last.y + last.z", "last.y"),
}


class Results(NamedTuple):
    """Products ``[T·P, E]``, NaN where none is stored, and hidden rows of a shared expert."""

    routed: Tensor
    shared: Tensor


def results(
    long: bool,
    format: QuantFormat,
    chosen: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    edit: SourceEdit | None = None,
) -> Results:
    """``chosen``: tokens, experts and how many each token has. Two pairs are of no expert."""
    tokens, experts, per_token = chosen
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    shapes = ((experts, INNER, WIDTH), (experts, WIDTH, INNER), (experts, INNER, WIDTH))
    w1, w2, w3 = (
        pack_weight(quantize(torch.randn(shape, generator=generator) * 0.2, format))
        for shape in shapes
    )
    ids_TP = torch.rand(tokens, experts, generator=generator).topk(per_token, dim=1).indices
    ids_TP[3, 0] = experts + 5
    ids_TP[-1, -1] = -1
    routing = torch.rand(tokens, per_token, generator=generator)
    with monkeypatch.context() as patch:
        if not long:
            patch.setattr(grouped, "takes_boxes", lambda *_: False)
        recording = Recording(Target(torch.device("cpu"), "sm_90a", 2), tokens)
        pairs = sort_pairs(recording, x, ids_TP, experts)
        hidden = gate_up(recording, x, w1, w3, LIMIT, pairs, routing)
        routed = down(recording, hidden, w2, pairs)
        shared = gate_up(recording, x, w1[0], w3[0], LIMIT)
    memory = execute(recording, tokens, edit)
    return Results(memory(routed), memory(shared))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("chosen", "tile", "format"),
    [
        ((150, 6, 2), NARROW, BF16),
        ((150, 6, 2), NARROW, NVFP4),
        ((140, 3, 2), WIDE, MXFP4),
        ((140, 3, 2), WIDE, FP8),
        # Whole tiles, and what is left of an expert's pairs.
        ((560, 2, 1), LARGE, NVFP4),
        ((560, 2, 1), LARGE, FP8),
    ],
    ids=str,
)
def test_the_same_bits(
    chosen: tuple[int, int, int],
    tile: Tile,
    format: QuantFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, experts, per_token = chosen
    assert Cut(per_token, experts, finely=True, coarsely=True).tiling(tokens).tile == tile
    long = results(True, format, chosen, monkeypatch)
    short = results(False, format, chosen, monkeypatch)
    assert int(short.routed.isnan().any(dim=1).sum()) == 2
    for one, other in zip(long, short, strict=True):
        assert torch.equal(one.isnan(), other.isnan()), "where no expert is, nothing is stored"
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (300, 2, 1)
    key = "grouped products of short steps", BF16, chosen
    short = shared(key, lambda: results(False, BF16, chosen, monkeypatch))
    found = results(True, BF16, chosen, monkeypatch, FAULTS[fault])
    assert not torch.equal(found.routed.nan_to_num(), short.routed.nan_to_num())
