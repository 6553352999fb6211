"""The exchanges of a decode step: words pushed by the kernel that computes a partial result, polled
by the one that needs the sum.
"""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.words import WordSum, incoming, outgoing, peers_of
from dsv4.ops.linear.decode import linear, linear_words
from dsv4.peers import LOGITS_EXCHANGE
from dsv4.weights.quant import Weight

_THREADS = 256


def row_parallel_linear(recording: Recording, x_TK: Tensor, weight: Weight) -> Tensor | WordSum:
    """``dsv4.ops.exchange.row_parallel_linear``: the product of a lone rank, or the sum over the
    ranks on its way, of which this rank's part is pushed.
    """
    if recording.peers is None:
        return linear(recording, x_TK, weight)
    words = WordSum(recording.next_exchange(), x_TK.shape[0], weight.shape[0])
    linear_words(recording, x_TK, weight, outgoing(recording, words))
    return words


def vocab_parallel_linear(
    recording: Recording, hidden_TE: Tensor, weight: Weight
) -> Tensor | WordSum:
    """``dsv4.ops.exchange.vocab_parallel_linear``; with peers the logits are on their way."""
    peers = recording.peers
    if peers is None:
        return linear(recording, hidden_TE, weight, torch.float32)
    words = WordSum(LOGITS_EXCHANGE, hidden_TE.shape[0], peers.layout.head_rows)
    linear_words(recording, hidden_TE, weight, outgoing(recording, words))
    return words


def gather_logits(recording: Recording, logits_TV: Tensor | WordSum) -> Tensor:
    """``dsv4.ops.exchange.gather_logits``."""
    if isinstance(logits_TV, Tensor):
        return logits_TV
    vocabulary = peers_of(recording).layout.vocabulary
    gathered_TV = recording.empty((logits_TV.tokens, vocabulary), torch.float32)
    words = incoming(recording, logits_TV)
    kernel = Kernel("exchange/exchange", "gather_logits", words.defines)
    recording.launch(
        Shape(kernel, (ceil_div(vocabulary, _THREADS), logits_TV.tokens), _THREADS),
        **words.arguments,
        logits=gathered_TV,
        width=vocabulary,
    )
    return gathered_TV


def summed(recording: Recording, y_TE: Tensor | WordSum) -> Tensor:
    """``dsv4.ops.exchange.summed``: bfloat16 ``[T, E]``."""
    if isinstance(y_TE, Tensor):
        return y_TE
    words = incoming(recording, y_TE)
    sum_TE = recording.empty((y_TE.tokens, y_TE.width), torch.bfloat16)
    count = y_TE.tokens * y_TE.width
    kernel = Kernel("exchange/exchange", "sum_words", words.defines)
    shape = Shape(kernel, ceil_div(count, _THREADS), _THREADS)
    recording.launch(shape, **words.arguments, y=sum_TE, count=count)
    return sum_TE


def next_step(recording: Recording) -> None:
    """A step that embeds no tokens begins."""
    if recording.peers is not None:
        defines = (("RANKS", recording.peers.ranks),)
        kernel = Kernel("exchange/exchange", "next_step", defines)
        recording.launch(Shape(kernel, 1, 32), step=recording.begin_step())


def begin_logits(recording: Recording) -> None:
    """A step begins that is nothing but logits. Their words take the place of those of the logits
    before, perhaps without a sum in between, so the ranks meet: all have read them.
    """
    if recording.peers is not None:
        next_step(recording)
        recording.meet()
