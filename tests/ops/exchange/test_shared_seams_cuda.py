"""Seams of a long step whose tokens ranks share, several ranks on one GPU: bit for bit those that a
rank computes for all tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.prefill import PartialSum
from dsv4.ops.hyper_connection import HcHeadWeights
from dsv4.ops.hyper_connection import prefill as hc
from dsv4.ops.trees import map_tensors, tensors_in
from dsv4.parallel.rank_state import connect
from dsv4.peers import InboxLayout, Peers
from tests.ops.cases import EPS, HC_EPS, normal
from tests.ops.exchange.on_gpu import CUDA, RANKS
from tests.ops.hyper_connection.exact import mixing, seam_weights

pytestmark = pytest.mark.gpu

WIDTH = 256
STREAMS = 4
MOST = 600
# Fewer tokens than the ranks have tiles, tiles that are not full, and some of each.
TOKENS = (9, 16, 17, 128, 300, MOST)


def run(
    peers: Peers, whole: bool, op: Callable[..., Any], *arguments: Any
) -> tuple[Callable[[int], None], Any]:
    """What runs an op of a rank for a number of tokens, and the memory of its results."""
    recording = Recording(Target.of(CUDA), MOST, None, peers, whole)
    recorded = op(recording, *arguments)
    for tensor in tensors_in(recorded):
        recording.keep(tensor)
    program = Program(recording)
    results = map_tensors(recorded, program.tensor)

    def queue(tokens: int) -> None:
        with torch.cuda.device(CUDA):
            program.run(tokens)

    return queue, results


def owned(tokens: int, ranks: int, rank: int) -> Tensor:
    """Which tokens are a rank's: tiles of 16 in turn."""
    return torch.arange(tokens, device=CUDA) // 16 % ranks == rank


@pytest.mark.parametrize("ranks", RANKS)
def test_shared_seams_have_the_bits_of_whole_ones(ranks: int) -> None:
    peers = connect(InboxLayout(ranks, WIDTH, 250), [CUDA] * ranks, MOST)
    for rank, one in enumerate(peers):
        one.partials_STE.copy_(normal(2, MOST, WIDTH, seed=rank).to(CUDA))
    streams_TME = normal(MOST, STREAMS, WIDTH, seed=20, dtype=torch.bfloat16).to(CUDA)
    residual = streams_TME, *mixing(MOST, STREAMS)
    weights, norm = seam_weights(STREAMS, WIDTH), normal(WIDTH, seed=22).to(CUDA)
    head = HcHeadWeights(
        weights.fn[:STREAMS].contiguous(),
        weights.base[:STREAMS].contiguous(),
        weights.scale[:1].contiguous(),
        EPS,
        HC_EPS,
    )
    y_TE = PartialSum(1, torch.empty(MOST, WIDTH, device="meta"))
    ops: dict[str, tuple[Any, ...]] = {
        "hc_seam": (y_TE, *residual, weights, norm),
        "hc_post": (y_TE, *residual),
        "hc_head": (streams_TME, head, norm),
    }
    for name, arguments in ops.items():
        whole, expected = run(peers[0], True, getattr(hc, name), *arguments)
        shares = [run(one, False, getattr(hc, name), *arguments) for one in peers]
        sent = {"hc_seam": 1, "hc_head": 0, "hc_post": None}[name]
        for tokens in TOKENS:
            whole(tokens)
            for one in peers:
                one.inputs_TE.fill_(7.0)
            for queue, results in shares:
                for tensor in tensors_in(results):
                    if tensor.data_ptr() not in {one.inputs_TE.data_ptr() for one in peers}:
                        tensor.fill_(7.0)
                queue(tokens)
            torch.cuda.synchronize()
            wanted = list(tensors_in(expected))
            for rank, (_, results) in enumerate(shares):
                own = owned(tokens, ranks, rank)
                for index, found in enumerate(tensors_in(results)):
                    if index == sent:
                        assert torch.equal(found[:tokens], wanted[index][:tokens])
                        assert found.data_ptr() == peers[rank].inputs_TE.data_ptr()
                    else:
                        assert torch.equal(found[:tokens][own], wanted[index][:tokens][own])
                        assert bool((found[:tokens][~own] == 7).all())
                    assert bool((found[tokens:] == 7).all())
