"""Exchanges of words that every rank can compute for all, so that each finds by itself what is
wrong with them.
"""

from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.words import WordSum, incoming, outgoing, peers_of

_THREADS = 256


def push_known(recording: Recording, tokens: int, width: int) -> WordSum:
    """This rank's part ``[tokens, width]`` of the next sum over the ranks; ``width`` is even."""
    words = WordSum(recording.next_exchange(), tokens, width)
    pushed = outgoing(recording, words)
    count = tokens * width
    kernel = Kernel("exchange/known_words", "push_known", pushed.defines)
    recording.launch(
        Shape(kernel, ceil_div(count, _THREADS), _THREADS),
        **pushed.arguments,
        rank=peers_of(recording).rank,
        count=count,
    )
    return words


def check_known(recording: Recording, words: WordSum, wrong_1: Tensor) -> None:
    """Adds to ``wrong_1`` int32 ``[1]`` how many of the sums of ``push_known`` are not, bit for
    bit, what the ranks push.
    """
    polled = incoming(recording, words)
    count = words.tokens * words.width
    kernel = Kernel("exchange/known_words", "check_known", polled.defines)
    blocks = ceil_div(count, 2 * _THREADS)
    recording.launch(
        Shape(kernel, blocks, _THREADS), **polled.arguments, count=count, wrong=wrong_1
    )
