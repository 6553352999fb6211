"""Ranks on one GPU: their ops, and words as kernels push them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.trees import map_tensors, tensors_in
from dsv4.parallel.rank_state import connect
from dsv4.peers import InboxLayout, Peers
from tests.ops.cases import normal
from tests.ops.gpu import poison

CUDA = torch.device("cuda", 0)
RANKS = (2, 4, 8)
# Of the longest chunk.
MOST = 64
WIDTH = 200
SPECIAL = (math.nan, -0.0, 0.0, math.inf, -math.inf, 1e-42, 3e38)


def ranks_of(ranks: int, width: int = WIDTH, vocabulary: int = 250) -> list[Peers]:
    """All ranks, on the same GPU."""
    return connect(InboxLayout(ranks, width, vocabulary), [CUDA] * ranks, MOST)


def prepared(
    peers: Peers, tokens: int, op: Callable[..., Any], *arguments: Any
) -> tuple[Callable[[int], None], Any]:
    """What queues a rank's ``op(recording, *arguments)`` for a number of tokens, and the memory of
    its result, which holds NaN before.
    """
    recording = Recording(Target.of(CUDA), tokens, None, peers)
    recorded = op(recording, *arguments)
    for tensor in tensors_in(recorded):
        recording.keep(tensor)
    poison()
    program = Program(recording)

    def run(count: int) -> None:
        with torch.cuda.device(CUDA):
            program.run(count)

    return run, map_tensors(recorded, program.tensor)


def run_on(peers: Peers, tokens: int, op: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a rank's op, run at once."""
    run, result = prepared(peers, tokens, op, *arguments)
    run(tokens)
    return result


def parts(ranks: int, tokens: int, width: int) -> list[Tensor]:
    """Partial results, with all pairs of special values in the first columns."""
    found = [normal(tokens, width, seed=rank).to(CUDA) for rank in range(ranks)]
    pairs = [(one, other) for one in SPECIAL for other in SPECIAL]
    for column, (one, other) in enumerate(pairs):
        found[0][:, column], found[-1][:, column] = one, other
    return found


def begin(peers: list[Peers], step: int) -> None:
    """All ranks are in this step."""
    for one in peers:
        one.step_4[0] = step


def words_at(peers: Peers, words: WordSum, rank: int) -> Tensor:
    """The words of a rank's part in an inbox, and what follows them."""
    return peers.inbox[peers.layout.slot(words.exchange) + rank * peers.layout.rank_words :]


def write(peers: Peers, words: WordSum, rank: int, values: Tensor, step: int) -> None:
    """A rank's part in an inbox, as a kernel pushes it in this step."""
    tag = (step * 256 + words.exchange) % (1 << 32)
    high = (tag << 32) - (1 << 64 if tag >= 1 << 31 else 0)
    low = values.contiguous().view(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words_at(peers, words, rank)[: values.numel()].copy_(low | high)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    assert found.dtype == expected.dtype
    both_nan = found.isnan() & expected.isnan()
    return bool(((bits(found) == bits(expected)) | both_nan).all())


def bits(tensor: Tensor) -> Tensor:
    """As integers."""
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
