"""Rotated index queries, executed on the CPU as few and many tokens are launched, against the torch
op.
"""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import indexer as reference
from dsv4.ops.indexer.query import index_query
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

SOURCE = "index_query.cu"
FAULTS = {
    "every token is at the first position": SourceEdit(
        SOURCE, "positions[blockIdx.y]", "positions[0]"
    ),
    "a block's last heads are left out": SourceEdit(
        SOURCE, "head < stop; head += warps", "head < stop - 1; head += warps"
    ),
    "queries keep their length": SourceEdit(SOURCE, "out + start, normaliser", "out + start, 1.0f"),
}


def is_right(
    heads: int,
    width: int,
    rope_width: int,
    start: int,
    tokens: int,
    edit: SourceEdit | None = None,
    shift: int = 0,
) -> bool:
    """Equal but for few roundings between neighbours, which the order of a sum decides. ``shift``:
    of the queries' memory, in values.
    """
    generator = torch.Generator().manual_seed(width + tokens)
    values = torch.randn(shift + tokens * heads * width, generator=generator).bfloat16()
    q_TID = values[shift:].view(tokens, heads, width)
    positions_T = start + torch.arange(tokens)
    inv_freq = 160000.0 ** (-torch.arange(0, rope_width, 2) / rope_width)
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    out_TID = index_query(recording, q_TID, positions_T, inv_freq)
    found = execute(recording, tokens, edit)(out_TID).float()
    expected = reference.index_query(q_TID, positions_T, inv_freq).float()
    difference = (found - expected).abs()
    rare = float((difference > 0).float().mean()) < 0.01
    return rare and float(difference.max()) <= 2**-7 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("heads", "width", "rope_width"), [(9, 128, 64), (3, 64, 16), (2, 32, 32), (1, 256, 64)]
)
def test_equals_the_torch_op(heads: int, width: int, rope_width: int) -> None:
    for start, tokens in ((0, 1), (1_000_000, 3), (123_456, 9)):
        assert is_right(heads, width, rope_width, start, tokens), (start, tokens)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_queries_that_begin_anywhere(shift: int) -> None:
    """Behind a product of any width, as in the buffer of a row list."""
    assert is_right(3, 128, 64, 1000, 1, shift=shift)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert not is_right(9, 128, 64, 1000, 3, FAULTS[fault])
