"""Seams whose tokens ranks share, executed on the CPU: each rank writes the rows of its own tokens
and no others, bit for bit those of a seam of all tokens. (The machine has no tf32 products, so that
``hc_mix_many`` is left to the GPU.)
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.prefill import PartialSum
from dsv4.ops.hyper_connection import prefill as hc
from tests.ops.cases import normal
from tests.ops.exchange.meta import peers
from tests.ops.hyper_connection.meta import arguments
from tests.ops.recorded import shape_at
from tests.ptx.nvrtc import SourceEdit, run_recorded

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ARCHITECTURE = "sm_90a"
WIDTH = 64
STREAMS = 4
MOST = 80
# The last tile is not full, and one rank of four has a tile less.
TOKENS = 73
RANKS = (2, 4)
OTHER_TILES = SourceEdit(
    "token_share.cuh",
    "return (own / TOKEN_TILE * OWNERS + owner) * TOKEN_TILE + own % TOKEN_TILE;",
    "return own + owner * TOKEN_TILE;",
)


def last_launch(op: str, rank: int, ranks: int, whole: bool) -> Launch:
    view = peers(rank, ranks, WIDTH)
    found = Recording(Target(CPU, ARCHITECTURE, 132), MOST, None, view, whole)
    _, *given = arguments(op, MOST, STREAMS, WIDTH)
    y_TE = PartialSum(0, found.empty((MOST, WIDTH), torch.float32))
    getattr(hc, op)(found, y_TE, *given)
    launch = found.items[-1]
    assert isinstance(launch, Launch)
    return launch


def bf16(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.bfloat16)


def post(rank: int, ranks: int, whole: bool, edit: SourceEdit | None = None) -> list[Tensor]:
    """The streams that ``hc_post`` writes on a rank."""
    memory = {
        "y": bf16(MOST, WIDTH, seed=1),
        "streams": bf16(MOST, STREAMS, WIDTH, seed=2),
        "post": normal(MOST, STREAMS, seed=3),
        "comb": normal(MOST, STREAMS, STREAMS, seed=4),
        "out": torch.full((MOST, STREAMS, WIDTH), 7.0, dtype=torch.bfloat16),
    }
    launch = last_launch("hc_post", rank, ranks, whole)
    run_recorded(launch, ARCHITECTURE, memory, TOKENS, edit=edit)
    return [memory["out"]]


def finish(rank: int, ranks: int, whole: bool, edit: SourceEdit | None = None) -> list[Tensor]:
    """What ``hc_finish`` writes on a rank: post, comb, and x in the memory of all ranks."""
    launch = last_launch("hc_seam", rank, ranks, whole)
    shape = shape_at(launch, TOKENS)
    assert isinstance(shape, Shape)
    assert dict(shape.kernel.defines)["SPLITS"] == 1
    partials = normal(MOST * (STREAMS * (2 + STREAMS) + 1), seed=5).abs()
    x_RTE = torch.full((ranks, MOST, WIDTH), 7.0, dtype=torch.bfloat16)
    table_P = torch.zeros(3 * ranks + 3, dtype=torch.int64)
    table_P[2 * ranks + 3 :] = torch.tensor([one.data_ptr() for one in x_RTE])
    memory: Mapping[str, Tensor] = {
        "streams": bf16(MOST, STREAMS, WIDTH, seed=2),
        "partials": partials,
        "base": normal(STREAMS * (2 + STREAMS), seed=6),
        "scale": normal(3, seed=7),
        "norm_weight": normal(WIDTH, seed=8),
        "x": x_RTE,
        "post": torch.full((MOST, STREAMS), 7.0),
        "comb": torch.full((MOST, STREAMS, STREAMS), 7.0),
        **({} if whole else {"peers": table_P}),
    }
    run_recorded(launch, ARCHITECTURE, memory, TOKENS, edit=edit)
    rows = x_RTE[:1] if whole else x_RTE
    return [memory["post"], memory["comb"], *rows]


KERNELS = {"hc_post": post, "hc_finish": finish}


def differs(kernel: str, ranks: int, edit: SourceEdit | None = None) -> bool:
    """Whether a rank writes anything else than the rows of its tokens."""
    expected = KERNELS[kernel](0, ranks, True)
    for rank in range(ranks):
        found = KERNELS[kernel](rank, ranks, False, edit)
        own = torch.arange(MOST) // 16 % ranks == rank
        own[TOKENS:] = False
        # The last one of a seam of all tokens is x, which the ranks have each.
        wanted = [*expected, *expected[-1:] * (len(found) - len(expected))]
        for one, other in zip(found, wanted, strict=True):
            if not torch.equal(one[own], other[own]) or bool((one[~own] != 7).any()):
                return True
    return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_writes_the_rows_of_its_tokens_alone(kernel: str, ranks: int) -> None:
    assert not differs(kernel, ranks)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ranks_that_took_other_tokens_would_show(kernel: str) -> None:
    assert differs(kernel, 2, OTHER_TILES)
