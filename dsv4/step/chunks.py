"""A prompt in chunks: the split, and the run with the host a limited number of chunks ahead."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.progress import Progress

# Appends a chunk: its final hidden states.
RunStep = Callable[[Sequence[int]], Tensor]
# A chunk takes a device as long as its tokens and so many more, which stand for the weights that it
# reads whatever the number of tokens (docs/log.md).
_FIXED_TOKENS = 800
_LEAST_TOKENS = 256


@dataclass(frozen=True)
class PromptChunks:
    """How prompts are cut: into chunks of ``largest`` tokens. Where they pass through several
    ``devices`` one after another, a prompt is cut into halves of that, and halves of these, as long
    as more chunks make it faster: with one alone all devices but one are idle.
    """

    largest: int
    devices: int

    def cut(self, token_ids: list[int]) -> list[list[int]]:
        """The chunks of a prompt; none of an empty one."""
        lengths = [self.largest]
        while lengths[-1] // 2 >= _LEAST_TOKENS:
            lengths.append(lengths[-1] // 2)
        count = len(token_ids)
        return _pieces(token_ids, min(lengths, key=lambda length: self._time(count, length)))

    def _time(self, count: int, length: int) -> int:
        """Of ``count`` tokens in chunks of ``length``, in tokens of one device: of all chunks on
        the first one, then of the longest on each other.
        """
        on_first = count + ceil_div(count, length) * _FIXED_TOKENS
        return on_first + (self.devices - 1) * (min(count, length) + _FIXED_TOKENS)


def _pieces(token_ids: list[int], length: int) -> list[list[int]]:
    return [token_ids[start : start + length] for start in range(0, len(token_ids), length)]


def split_ids(token_ids: list[int], sizes: list[int], largest: int) -> list[list[int]]:
    """Chunks of the given ``sizes``; a size above ``largest`` becomes several chunks.

    Raises ``ValueError`` unless the sizes are positive and sum to the number of ids.
    """
    count = len(token_ids)
    if sum(sizes) != count or any(size < 1 for size in sizes):
        expected = f"expected positive integers that sum to {count}"
        raise ValueError(f"chunk_sizes: found {sizes}, {expected}")
    chunks = []
    start = 0
    for size in sizes:
        chunks += _pieces(token_ids[start : start + size], largest)
        start += size
    return chunks


def run_chunks(
    run: RunStep,
    chunks: Sequence[Sequence[int]],
    ahead: int,
    progress: Progress | None,
) -> Tensor:
    """Appends ``chunks`` (at least one): the final hidden states of the last one.

    At most ``ahead`` chunks are in flight: enough for every device to have work, few enough for
    ``progress(done, total)`` to mean something.
    """
    total = sum(len(chunk) for chunk in chunks)
    done = 0
    in_flight: deque[torch.cuda.Event] = deque()
    hidden_TE = None
    for chunk in chunks:
        hidden_TE = run(chunk)
        if hidden_TE.is_cuda:
            in_flight.append(torch.cuda.Event())
            in_flight[-1].record(torch.cuda.current_stream(hidden_TE.device))
        if len(in_flight) > ahead:
            in_flight.popleft().synchronize()
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    assert hidden_TE is not None
    return hidden_TE
