"""Normalised and rotated queries, executed on the CPU, against the torch op."""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import rope as reference
from tests.ops import forms
from tests.ops.cases import EPS
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

FAULTS = {
    "queries are not normalised": (
        512,
        SourceEdit("query_rope.cu", "row.normalise(nullptr, eps)", ""),
    ),
    "every token is at the first position": (
        512,
        SourceEdit("query_rope.cu", "position = positions[token]", "position = positions[0]"),
    ),
    "any geometry: a pair is not turned": (
        20,
        SourceEdit("query_rope.cu", "pair = threadIdx.x; pair", "pair = threadIdx.x + 1; pair"),
    ),
}


def is_right(
    heads: int,
    width: int,
    rope_width: int,
    start: int,
    tokens: int,
    edit: SourceEdit | None = None,
) -> bool:
    """Equal but for roundings between two neighbours of bf16 that the order of the sum of squares
    decides.
    """
    generator = torch.Generator().manual_seed(width + tokens)
    q_THD = torch.randn(tokens, heads, width, generator=generator).bfloat16()
    positions_T = start + torch.arange(tokens)
    inv_freq = 160000.0 ** (-torch.arange(0, rope_width, 2) / rope_width)
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    out_THD = forms.query_rope(recording, q_THD, positions_T, inv_freq, EPS)
    found = execute(recording, tokens, edit)(out_THD).float()
    expected = reference.query_rope(q_THD, positions_T, inv_freq, EPS).float()
    difference = (found - expected).abs()
    allowed = 2**-7 * expected.abs()
    # A rotated pair mixes two rounded values, each of which may have gone to the other neighbour.
    allowed[..., width - rope_width :] += 2**-5
    rare = int((difference > 0).sum()) <= max(2, 2e-3 * difference.numel())
    return rare and bool((difference <= allowed).all())


@pytest.mark.parametrize(
    ("heads", "width", "rope_width"),
    [(20, 512, 64), (3, 64, 16), (2, 96, 32), (2, 256, 160), (3, 20, 6)],
)
def test_equals_the_torch_op(heads: int, width: int, rope_width: int) -> None:
    """Of few tokens, several blocks of whose heads run, and of many."""
    for start, tokens in ((0, 1), (1_000_000, 3), (123_456, 9)):
        assert is_right(heads, width, rope_width, start, tokens), (start, tokens)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    width, edit = FAULTS[fault]
    assert not is_right(3, width, 6 if width == 20 else 64, 1000, 3, edit)
