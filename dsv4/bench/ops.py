"""``bench ops``: every op on real shapes, each call on weights that the caches do not hold."""

import importlib
import pkgutil
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import dsv4.ops
from dsv4.bench.device import cache_bytes, capture, copy_ceiling, replay_microseconds
from dsv4.integers import ceil_div
from dsv4.native.bench import cases as native_cases
from dsv4.ops.op_case import OpCase

MAX_COPIES = 64
MEMORY_LIMIT = 48 << 30
_CALLS_PER_GRAPH = 24


def all_cases(only: str) -> Iterator[OpCase]:
    """The cases of every ``dsv4/ops/<op>/bench*.py``, and those of ``dsv4/native/bench.py``, whose
    "op: name" contains ``only``.
    """
    for case in _every_case():
        if only in f"{case.op}: {case.name}":
            yield case


def _every_case() -> Iterator[OpCase]:
    for room in pkgutil.iter_modules(dsv4.ops.__path__, "dsv4.ops."):
        if not room.ispkg:
            continue
        for module in pkgutil.iter_modules(
            importlib.import_module(room.name).__path__, f"{room.name}."
        ):
            if module.name.rpartition(".")[2].startswith("bench"):
                yield from importlib.import_module(module.name).cases()
    yield from native_cases()


def measure(case: OpCase, ceiling: float, repeats: int = 20) -> dict[str, Any]:
    """µs per call (median and p90 over graph replays), GB/s, share of the copy ceiling and TFLOP/s
    of one case.

    The graph runs the op on as many copies of its inputs as exceed the L2 cache three times, in
    rotation, so the time per call includes what a dependent launch costs inside a graph.
    """
    wanted = ceil_div(3 * cache_bytes(), case.resident_bytes)
    copies = min(MAX_COPIES, max(1, wanted), MEMORY_LIMIT // case.resident_bytes)
    runs = [case.make(index) for index in range(max(1, copies))]
    calls = [runs[index % len(runs)] for index in range(max(len(runs), _CALLS_PER_GRAPH))]
    graph = capture(calls)
    once = replay_microseconds(graph, 1)[0]
    replays = max(3, min(repeats, int(3e5 / once)))
    per_call = [total / len(calls) for total in replay_microseconds(graph, replays)]
    median = statistics.median(per_call)
    return {
        "op": case.op,
        "case": case.name,
        "us": round(median, 3),
        "us_p90": round(statistics.quantiles(per_call, n=10)[-1], 3),
        "gb_per_s": round(case.nbytes / median * 1e-3, 1),
        "percent_of_copy": round(100 * case.nbytes / (median * 1e-6) / ceiling, 1),
        "tflop_per_s": round(case.flops / median * 1e-6, 2),
        "bytes": case.nbytes,
        "flops": case.flops,
        "copies": len(runs),
    }


def bench_ops(only: str, write_line: Any) -> dict[str, Any]:
    """Measures every selected case; ``write_line(text)`` gets the table as it grows. A case that
    fails says so.
    """
    ceiling = copy_ceiling()
    write_line(f"copy ceiling {ceiling / 1e9:.0f} GB/s")
    results = []
    failures = []
    for case in all_cases(only):
        started = time.perf_counter()
        try:
            row = measure(case, ceiling)
        except (RuntimeError, ValueError) as error:
            failures.append({"op": case.op, "case": case.name, "error": str(error).splitlines()[0]})
            write_line(f"{case.op:<18} {case.name:<46} failed: {failures[-1]['error']}")
            continue
        results.append(row)
        write_line(
            f"{row['op']:<18} {row['case']:<46} {row['us']:>9.2f} us {row['gb_per_s']:>7.0f} GB/s "
            f"{row['percent_of_copy']:>5.1f} % {row['tflop_per_s']:>7.1f} TFLOP/s  "
            f"({time.perf_counter() - started:.1f} s)"
        )
        torch.cuda.empty_cache()
    return {"copy_gb_per_s": round(ceiling / 1e9, 1), "cases": results, "failures": failures}
