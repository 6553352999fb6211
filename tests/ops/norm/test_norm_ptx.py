"""rms_norm executed on the CPU: vectors and single columns, rows of several accesses."""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.norm.cuda import rms_norm
from tests.ops.cases import EPS, assert_rounded_once, normal
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

CPU = torch.device("cpu")
TOKENS = 3
FAULTS = {
    "eps is left out": SourceEdit("rms_norm.cu", "+ eps", ""),
    "the weight of the first columns is that of all": SourceEdit(
        "rms_norm.cu", "(weight + first, factors[g])", "(weight, factors[g])"
    ),
}


def assert_normalised(
    width: int,
    per_token: int = 1,
    weighted: bool = True,
    shift: int = 0,
    edit: SourceEdit | None = None,
) -> None:
    """Recorded for more tokens; one row is so small that eps counts. ``shift``: of all rows."""
    most = TOKENS + 2
    values = normal(shift + most * per_token * width, seed=width, dtype=torch.bfloat16)
    x = values[shift:].view(most, per_token, width)
    x[1] *= 2.0**-9
    weight = normal(width, seed=1) if weighted else None
    recording = Recording(Target(CPU, "sm_90a", 132), most)
    y = rms_norm(recording, x, weight, EPS)
    found = execute(recording, TOKENS, edit)(y)
    wide = x[:TOKENS].double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + EPS) ** -0.5
    assert_rounded_once(found[:TOKENS], exact if weight is None else exact * weight.double())
    assert found[TOKENS:].isnan().all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [1, 7, 96, 1536, 2500])
def test_equals_the_formula_rounded_once(width: int, weighted: bool) -> None:
    assert_normalised(width, weighted=weighted)


def test_heads_and_rows_that_begin_anywhere() -> None:
    assert_normalised(128, per_token=3)
    assert_normalised(128, shift=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_normalised(96, edit=FAULTS[fault])
