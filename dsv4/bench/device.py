"""Timing on one CUDA device: graph replays, and the ceilings that results are compared with."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of ``calls`` in their order; each has run once before, so that nothing compiles in the capture."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_microseconds(graph: torch.cuda.CUDAGraph, repeats: int, warm_up: int = 3) -> list[float]:
    """µs of each of ``repeats`` replays, by events; the host runs ahead, so that no launch waits for it."""
    for _ in range(warm_up):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def copy_ceiling() -> float:
    """Bytes per second, read plus written, of a 4 GiB device copy of random bytes: what a kernel can reach."""
    source = torch.randint(0, 256, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graph = capture([lambda: target.copy_(source)])
    return 2 * source.nbytes / (1e-6 * statistics.median(replay_microseconds(graph, 10)))


def cache_bytes() -> int:
    """Size of the L2 cache of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
