"""A decode step between projections and attention, executed on the CPU, against the torch op."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.prepare_attention import prepare_attention as torch_prepare_attention
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.executed import execute
from tests.ops.prepare_attention.agreement import poison_unseen, rows_agree, states_agree
from tests.ops.prepare_attention.cases import step
from tests.ptx.nvrtc import SourceEdit

SOURCE = "prepare_attention.cu"
FAULTS = {
    "tokens are all at the first position": SourceEdit(
        SOURCE, "fetch_settled(positions + token)", "fetch_settled(positions)"
    ),
    "the indexer keeps one token": SourceEdit(
        SOURCE, "(step, positions, 0, token,", "(step, positions, 0, 0,"
    ),
    "index queries keep their length": SourceEdit(
        SOURCE, "index_q_out + start, index_normaliser", "index_q_out + start, 1.0f"
    ),
}


def is_right(
    kind: str, quantised: bool, start: int, tokens: int, edit: SourceEdit | None = None
) -> bool:
    found = step(kind, start, tokens, heads=9, quantised=quantised)
    for part in found.compressions:
        poison_unseen(part.state, part.weights.ratio, start)
    expected = found.twin()
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    queries = prepare_attention(recording, *found.arguments())
    assert len(recording.items) == 1
    real = execute(recording, tokens, edit)
    right = torch_prepare_attention(*expected.arguments())
    assert (queries.index_TID is None) == (right.index_TID is None)
    agree = [
        queries_agree(real(mine), its)
        for mine, its in zip(queries, right, strict=True)
        if mine is not None and its is not None
    ]
    agree.append(rows_agree(found.ring, expected.ring))
    for one, two in zip(found.compressions, expected.compressions, strict=True):
        agree.append(states_agree(one.state, two.state))
    return all(agree)


def queries_agree(found: Tensor, expected: Tensor) -> bool:
    """Equal but for a few roundings that the order of a sum decides."""
    difference = (found.float() - expected.float()).abs()
    near = difference <= 2**-7 * expected.float().abs().max()
    return bool(near.all()) and float((difference > 0).float().mean()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("kind", "starts"), [("window", (0, 143)), ("csa", (0, 6)), ("hca", (125, 126))]
)
def test_equals_the_torch_op(kind: str, starts: tuple[int, ...], quantised: bool) -> None:
    """Of steps that complete a window and do not."""
    for start, tokens in zip(starts, (1, 2), strict=True):
        assert is_right(kind, quantised, start, tokens), (start, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert not is_right("csa", True, 6, 2, FAULTS[fault])
