"""comb of a seam that leaves it, executed on the CPU, by whichever launch computes it: streams bit
for bit those of a comb that ``hc_finish`` computes itself.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.hyper_connection import HcWeights
from dsv4.ops.hyper_connection import hc_post as torch_hc_post
from dsv4.ops.hyper_connection import hc_pre as torch_hc_pre
from dsv4.ops.hyper_connection.decode import hc_post, hc_pre, hc_seam
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.cases import EPS, HC_EPS, normal
from tests.ops.executed import execute
from tests.ops.prepare_attention.cases import step
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

STREAMS, WIDTH = 4, 64
TAKERS = ("nobody", "attention", "post", "early post", "seam", "early seam")
PREPARE = "prepare_attention.cu"
POST = "hyper_connection_post.cu"
MIX = "hyper_connection.cu"
FINISH = "hyper_connection_finish.cu"
FAULTS = {
    "that of the first token": ("attention", PREPARE, "unbalanced + first", "unbalanced"),
    "all tokens in one place": ("attention", PREPARE, "comb + first", "comb"),
    "an iteration too few": (
        "attention",
        PREPARE,
        "sinkhorn(balanced, hc_eps, iterations)",
        "sinkhorn(balanced, hc_eps, iterations - 1)",
    ),
    "no eps": ("attention", FINISH, "row[k] / total + hc_eps", "row[k] / total"),
    "not made before streams are mixed": ("post", POST, "if (LEFT) sinkhorn", "if (0) sinkhorn"),
    "not made by the seam": ("seam", MIX, "if (LEFT) sinkhorn", "if (0) sinkhorn"),
    "made with another eps": ("early seam", MIX, "in.hc_eps, in.it", "2 * in.hc_eps, in.it"),
}


def weights() -> HcWeights:
    mixes = (2 + STREAMS) * STREAMS
    fn = normal(mixes, STREAMS * WIDTH, seed=1, scale=(STREAMS * WIDTH) ** -0.5)
    base = normal(mixes, seed=2)
    return HcWeights(fn, base, torch.tensor([0.9, 1.1, 2.0]), EPS, HC_EPS, 20)


def streams(tokens: int) -> Tensor:
    return 3 * normal(tokens, STREAMS, WIDTH, seed=3, dtype=torch.bfloat16)


def result(tokens: int) -> Tensor:
    """Of the sublayer."""
    return normal(tokens, WIDTH, seed=4, dtype=torch.bfloat16)


@cache
def mixed(
    tokens: int, taker: str, leaves: bool = True, edit: SourceEdit | None = None
) -> list[Tensor]:
    """post, the streams behind the sublayer and, where a launch writes it, comb."""
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens, traced=not leaves)
    seam = weights(), torch.ones(WIDTH)
    _, post_TM, comb_TMM = hc_pre(recording, streams(tokens), *seam)
    if taker == "attention" or taker.startswith("early"):
        recording.call(lambda _: None)
    if taker == "attention":
        prepare_attention(recording, *step("window", 0, tokens, heads=2).arguments())
    if taker == "nobody":
        recording.call(lambda *_: None, comb_TMM)
    given = result(tokens), streams(tokens), post_TM, comb_TMM
    if taker.endswith("seam"):
        made_TME = hc_seam(recording, *given, *seam)[0]
    else:
        made_TME = hc_post(recording, *given)
    real = execute(recording, tokens, edit)
    written = [comb_TMM] if taker in ("nobody", "attention") else []
    return [real(part) for part in (post_TM, made_TME, *written)]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("taker", TAKERS)
def test_streams_are_those_of_a_comb_that_is_not_left(taker: str, tokens: int) -> None:
    found = mixed(tokens, taker)
    for part, own in zip(found, mixed(tokens, taker, leaves=False), strict=True):
        assert torch.equal(part, own)
    _, post_TM, comb_TMM = torch_hc_pre(streams(tokens), weights(), torch.ones(WIDTH))
    made_TME = torch_hc_post(result(tokens), streams(tokens), post_TM, comb_TMM)
    post, made, *written = found
    torch.testing.assert_close(post, post_TM, rtol=5e-5, atol=1e-7)
    torch.testing.assert_close(made, made_TME, rtol=2**-7, atol=1e-3)
    for comb in written:
        torch.testing.assert_close(comb, comb_TMM, rtol=5e-5, atol=1e-7)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    taker, file, text, planted = FAULTS[fault]
    found = mixed(3, taker, edit=SourceEdit(file, text, planted))
    pairs = zip(found, mixed(3, taker, leaves=False), strict=True)
    assert not all(torch.equal(part, own) for part, own in pairs)
