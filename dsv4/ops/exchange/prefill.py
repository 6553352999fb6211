"""The exchanges of a prefill step: every rank adds the partial results of all, read where they are,
for those tokens whose seams it computes.

A partial result may be written anew two exchanges later: by then its rank has added those of the
exchange between, which the others began only behind their own sums of this one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.exchange.token_share import WHOLE, TokenShare
from dsv4.ops.exchange.words import peers_of
from dsv4.ops.linear.aligned import without_gaps
from dsv4.ops.linear.prefill_products import RecordLinear
from dsv4.peers import SLOTS
from dsv4.weights.quant import Weight

_THREADS = 256
_VALUES = 4


@dataclass(frozen=True)
class PartialSum:
    """Partial results float32 ``[T, E]`` of all ranks, each in its own memory."""

    exchange: int
    own_TE: Tensor


def row_parallel_linear_with(
    linear: RecordLinear, recording: Recording, x: Tensor, weight: Weight
) -> Tensor | PartialSum:
    """``dsv4.ops.exchange.row_parallel_linear`` by an implementation of ``linear``."""
    if recording.peers is None:
        return linear(recording, x, weight, torch.bfloat16)
    return send_partial(recording, linear(recording, x, weight, torch.float32))


def send_partial(recording: Recording, partial_TE: Tensor) -> PartialSum:
    """A partial result is where the other ranks read it, once all have computed theirs."""
    peers = peers_of(recording)
    partial_TE = without_gaps(recording, partial_TE)
    exchange = recording.next_exchange()
    recording.place(partial_TE, peers.partials_STE[exchange % SLOTS])
    recording.meet()
    return PartialSum(exchange, partial_TE)


def summed(recording: Recording, y_TE: Tensor | PartialSum) -> Tensor:
    """bfloat16 ``[T, E]``: a tensor as it is, or the sum over the ranks, of all tokens."""
    return y_TE if isinstance(y_TE, Tensor) else sum_of(recording, y_TE, WHOLE)


def sum_of(recording: Recording, y_TE: PartialSum, share: TokenShare) -> Tensor:
    """bfloat16 ``[T, E]``, of which the rows of a share are written."""
    peers = peers_of(recording)
    tokens, width = y_TE.own_TE.shape
    sum_TE = recording.empty((tokens, width), torch.bfloat16)
    shape = by_tokens(_sum_shape, peers.ranks, share, width)
    first = y_TE.exchange % SLOTS * peers.partials_STE.stride(0)
    recording.launch(
        shape, peers=peers.table_P, first=first, y=sum_TE, owner=share.owner, width=width
    )
    return sum_TE


def _sum_shape(ranks: int, share: TokenShare, width: int, tokens: int) -> Shape:
    count = _VALUES if width % _VALUES == 0 else 1
    single = (("COUNT", 1),) if count == 1 else ()
    defines = (("RANKS", ranks), *share.defines, *single)
    kernel = Kernel("exchange/exchange", "sum_ranks", defines)
    blocks = ceil_div(share.rows(tokens) * width, _THREADS * count)
    return Shape(kernel, blocks, _THREADS, numbers={"tokens": tokens})
