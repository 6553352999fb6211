"""A prompt in chunks: the split, and the run with the host a limited number of chunks ahead."""

from collections import deque
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor

# Appends a chunk: its final hidden states.
RunStep = Callable[[Sequence[int]], Tensor]


def split_ids(token_ids: list[int], sizes: list[int], largest: int) -> list[list[int]]:
    """Chunks of the given ``sizes``; a size above ``largest`` becomes several chunks.

    Raises ``ValueError`` unless the sizes are positive integers that sum to the number of ids.
    """
    count = len(token_ids)
    are_integers = all(isinstance(size, Integral) for size in sizes)
    if not are_integers or sum(sizes) != count or any(size < 1 for size in sizes):
        expected = f"expected positive integers that sum to {count}"
        raise ValueError(f"chunk_sizes: found {sizes}, {expected}")
    chunks = []
    start = 0
    for size in sizes:
        part = token_ids[start : start + size]
        chunks += [part[first : first + largest] for first in range(0, size, largest)]
        start += size
    return chunks


def run_chunks(
    run: RunStep,
    chunks: Sequence[Sequence[int]],
    ahead: int,
    progress: Callable[[int, int], None] | None,
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
