"""comb, computed by a launch of its own or by that before attention, executed on the CPU: bit for
bit what ``hc_finish`` computes where it does not leave it.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.hyper_connection import HcWeights
from dsv4.ops.hyper_connection import hc_pre as torch_hc_pre
from dsv4.ops.hyper_connection.decode import hc_post, hc_pre
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.cases import EPS, HC_EPS, normal
from tests.ops.executed import execute
from tests.ops.prepare_attention.cases import step
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

STREAMS, WIDTH = 4, 64
TAKERS = ("nobody", "attention")
PREPARE = "prepare_attention.cu"
FAULTS = {
    "that of the first token": SourceEdit(PREPARE, "unbalanced + first", "unbalanced"),
    "all tokens in one place": SourceEdit(PREPARE, "comb + first", "comb"),
    "an iteration too few": SourceEdit(PREPARE, "hc_eps, iterations)", "hc_eps, iterations - 1)"),
    "no eps": SourceEdit("hyper_connection_finish.cu", "row[k] / total + hc_eps", "row[k] / total"),
}


def seam(leaves: bool) -> HcWeights:
    mixes = (2 + STREAMS) * STREAMS
    fn = normal(mixes, STREAMS * WIDTH, seed=1, scale=(STREAMS * WIDTH) ** -0.5)
    base = normal(mixes, seed=2)
    return HcWeights(fn, base, torch.tensor([0.9, 1.1, 2.0]), EPS, HC_EPS, 20, leaves)


def streams(tokens: int) -> Tensor:
    return 3 * normal(tokens, STREAMS, WIDTH, seed=3, dtype=torch.bfloat16)


@cache
def mixing(tokens: int, taker: str | None, edit: SourceEdit | None = None) -> list[Tensor]:
    """post and comb by ``taker``; None: nothing is left."""
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    norm_weight = torch.ones(WIDTH)
    _, *left = hc_pre(recording, streams(tokens), seam(taker is not None), norm_weight)
    if taker == "attention":
        recording.call(lambda _: None)
        prepare_attention(recording, *step("window", 0, tokens, heads=2).arguments())
    y_TE = normal(tokens, WIDTH, seed=4, dtype=torch.bfloat16)
    hc_post(recording, y_TE, streams(tokens), *left)
    real = execute(recording, tokens, edit)
    return [real(part) for part in left]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("taker", TAKERS)
def test_it_is_that_of_the_seam(taker: str, tokens: int) -> None:
    found = mixing(tokens, taker)
    for part, own in zip(found, mixing(tokens, None), strict=True):
        assert torch.equal(part, own)
    _, *right = torch_hc_pre(streams(tokens), seam(False), torch.ones(WIDTH))
    for part, of_torch in zip(found, right, strict=True):
        torch.testing.assert_close(part, of_torch, rtol=5e-5, atol=1e-7)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    found = mixing(3, "attention", FAULTS[fault])
    pairs = zip(found, mixing(3, None), strict=True)
    assert not all(torch.equal(part, own) for part, own in pairs)
