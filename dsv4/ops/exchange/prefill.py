"""The exchanges of a prefill step: partial results copied between the ranks, then added."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.weights.quant import Weight

# ``dsv4.ops.linear.prefill.linear``, or another library's.
Linear = Callable[[Recording, Tensor, Weight, torch.dtype], Tensor]
_THREADS = 256
_VALUES = 4


@dataclass(frozen=True)
class CopiedSum:
    """Partial results of all ranks: this one's own float32 ``[T, E]``, and those that are copied
    into its memory behind the part that computes them.
    """

    own_TE: Tensor


def row_parallel_linear_with(
    linear: Linear, recording: Recording, x: Tensor, weight: Weight
) -> Tensor | CopiedSum:
    """``dsv4.ops.exchange.row_parallel_linear`` by an implementation of ``linear``."""
    if recording.peers is None:
        return linear(recording, x, weight, torch.bfloat16)
    return send_partial(recording, linear(recording, x, weight, torch.float32))


def vocab_parallel_linear_with(
    linear: Linear, recording: Recording, hidden_TE: Tensor, weight: Weight
) -> Tensor:
    """``dsv4.ops.exchange.vocab_parallel_linear`` of a lone rank. Ranks compute the logits of at
    most 8 tokens at a time.
    """
    if recording.peers is not None:
        raise ValueError(f"hidden_TE: found {hidden_TE.shape[0]} tokens, expected at most 8")
    return linear(recording, hidden_TE, weight, torch.float32)


def send_partial(recording: Recording, partial_TE: Tensor) -> CopiedSum:
    """A partial result goes to the other ranks."""
    recording.send(partial_TE)
    return CopiedSum(partial_TE)


def summed(recording: Recording, y_TE: Tensor | CopiedSum) -> Tensor:
    """bfloat16 ``[T, E]``: a tensor as it is, or the sum over the ranks."""
    if isinstance(y_TE, Tensor):
        return y_TE
    peers = recording.peers
    assert peers is not None, "copies come from ranks"
    tokens, width = y_TE.own_TE.shape
    if width % _VALUES:
        raise ValueError(f"y_TE: found width {width}, expected a multiple of {_VALUES}")
    sum_TE = recording.empty((tokens, width), torch.bfloat16)
    kernel = Kernel("exchange/exchange", "sum_ranks", (("RANKS", peers.ranks),))

    def shape(count: int) -> Shape:
        blocks = ceil_div(count * width, _THREADS * _VALUES)
        return Shape(kernel, blocks, _THREADS, numbers={"count": count * width})

    recording.launch(
        shape,
        own=y_TE.own_TE,
        arrived=peers.arrived_NTE,
        y=sum_TE,
        rank=peers.rank,
        rank_stride=peers.arrived_NTE.stride(0),
    )
    return sum_TE
