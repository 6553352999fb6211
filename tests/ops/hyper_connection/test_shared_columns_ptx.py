"""``hc_finish`` whose blocks share the columns of a token, executed on the CPU: the collapsed
streams, post and comb are those of the torch op, and planted faults are seen.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.hyper_connection import hc_head as torch_hc_head
from dsv4.ops.hyper_connection import hc_pre as torch_hc_pre
from dsv4.ops.hyper_connection.decode import hc_head, hc_pre
from tests.ops.cases import EPS, HC_EPS, normal
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

STREAMS = 4
# The first has two warps of columns in each of four blocks, the other three, no power of two.
WIDTHS = (2048, 3072)
FINISH = "hyper_connection_finish.cu"
FAULTS = {
    "all blocks' squares in one place": ("&squares[rank][warp]", "&squares[0][warp]"),
    "pre without its last sum": ("FIRST = APART ? STREAMS + 1", "FIRST = APART ? STREAMS"),
    "post and comb before their sums": ("            meet<3, SIDES * WARP>();\n", ""),
    "post and comb without their sums": ("other_partials.add(sums, others);", ""),
    "squares of the first warps": ("values[i] += values[i + offset];", "values[i] += 0.0f;"),
}


def weights(width: int) -> HcWeights:
    mixes = (2 + STREAMS) * STREAMS
    fn = normal(mixes, STREAMS * width, seed=1, scale=(STREAMS * width) ** -0.5)
    return HcWeights(fn, normal(mixes, seed=2), torch.tensor([0.9, 1.1, 2.0]), EPS, HC_EPS, 20)


def streams(tokens: int, width: int) -> Tensor:
    return 3 * normal(tokens, STREAMS, width, seed=3, dtype=torch.bfloat16)


def norm_weight(width: int) -> Tensor:
    return 1 + normal(width, seed=4) / 4


def recording(tokens: int, traced: bool = False) -> Recording:
    return Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens, traced=traced)


def collapsed(tokens: int, width: int, edit: SourceEdit | None = None) -> list[Tensor]:
    """x, post and comb of ``hc_pre``, which does not leave comb."""
    record = recording(tokens, traced=True)
    results = hc_pre(record, streams(tokens, width), weights(width), norm_weight(width))
    real = execute(record, tokens, edit)
    return [real(result) for result in results]


def assert_right(found: list[Tensor], tokens: int, width: int) -> None:
    x, post, comb = found
    expected = torch_hc_pre(streams(tokens, width), weights(width), norm_weight(width))
    torch.testing.assert_close(x, expected[0], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(post, expected[1], rtol=5e-5, atol=1e-7)
    torch.testing.assert_close(comb, expected[2], rtol=5e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_that_share_columns_collapse_the_streams(width: int, tokens: int) -> None:
    assert_right(collapsed(tokens, width), tokens, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_they_collapse_the_last_streams(width: int) -> None:
    seam = weights(width)
    head = HcHeadWeights(seam.fn[:STREAMS], seam.base[:STREAMS], seam.scale[:1], EPS, HC_EPS)
    record = recording(2)
    x = hc_head(record, streams(2, width), head, norm_weight(width))
    expected = torch_hc_head(streams(2, width), head, norm_weight(width))
    torch.testing.assert_close(execute(record, 2)(x), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    width = WIDTHS[1]
    found = collapsed(1, width, SourceEdit(FINISH, *FAULTS[fault]))
    with pytest.raises(AssertionError):
        assert_right(found, 1, width)
