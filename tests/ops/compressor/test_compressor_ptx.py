"""The compressor, executed on the CPU as both forms run it, against the torch op."""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import compressor as reference
from tests.ops import forms
from tests.ops.executed import execute
from tests.ops.prepare_attention.agreement import poison_unseen, states_agree
from tests.ops.prepare_attention.cases import step
from tests.ptx.nvrtc import SourceEdit

# Kind of layer, and which of its compressors.
COMPRESSORS = {"csa": ("csa", 0), "index": ("csa", 1), "hca": ("hca", 0)}
FAULTS = {
    "the bias is left out": SourceEdit(
        "compressor.cuh", "scores[i] += step.ape[nth % Ratio * columns + column]", "scores[i] += 0"
    ),
    "the last window is left out": SourceEdit(
        "compressor.cuh", "<= start + step.count && window", "< start + step.count && window"
    ),
    "the ring begins elsewhere": SourceEdit(
        "compressor.cu", "count - gridDim.x + blockIdx.x", "blockIdx.x"
    ),
}


def is_right(
    name: str, quantised: bool, start: int, tokens: int, edit: SourceEdit | None = None
) -> bool:
    kind, number = COMPRESSORS[name]
    found = step(kind, start, tokens, quantised=quantised)
    part = found.compressions[number]
    poison_unseen(part.state, part.weights.ratio, start)
    other = found.twin().compressions[number]
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    products = part.kv_TW, part.score_TW, found.positions_T, part.weights
    forms.compress(recording, *products, part.state)
    execute(recording, tokens, edit)
    reference.compress(*products, other.state)
    return states_agree(part.state, other.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantised"),
    [("csa", True), ("csa", False), ("index", True), ("index", False), ("hca", True)],
)
def test_equals_the_torch_op(name: str, quantised: bool) -> None:
    """Windows that begin before the step and in it, end in it and behind it; a ring that is full
    and one that is not.
    """
    for start, tokens in ((126, 2), (250, 9), (0, 1)):
        assert is_right(name, quantised, start, tokens), (start, tokens)


def test_more_tokens_than_the_ring_holds() -> None:
    assert is_right("index", True, 2, 30)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert not is_right("index", True, 4, 30 if "ring" in fault else 12, FAULTS[fault])
