"""Timing on one CUDA device: graph replays, and the ceilings that results are compared with."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from dsv4.errors import UserError

# Replays in front of those that count.
_WARM_UP = 3


def need_cuda() -> None:
    """Raises ``UserError`` where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA device, found none")


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of ``calls`` in their order; each has run once before, so that nothing
    compiles in the capture.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """µs of each of ``repeats`` replays, by events; the host runs ahead, so that no launch waits
    for it.
    """
    for _ in range(_WARM_UP):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def copy_ceiling() -> float:
    """Bytes per second, read plus written, of a kernel over 4 GiB of random words: what a kernel
    can reach.
    """
    source = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # A kernel of its own and not a captured copy: a memcpy node of a graph runs on a copy engine,
    # far below this rate.
    graph = capture([lambda: torch.add(source, 1, out=target)])
    return 2 * source.nbytes / (1e-6 * statistics.median(replay_microseconds(graph, 10)))


def cache_bytes() -> int:
    """Size of the L2 cache of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
