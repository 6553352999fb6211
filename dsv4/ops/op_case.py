"""What an op benchmark runs: one op on one real shape, with as many independent copies of its
inputs as asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class OpCase:
    """One row of ``python -m dsv4.bench ops``.

    ``make(i)`` allocates the i-th independent copy of the inputs on the current CUDA device (random
    values, the same device generator; packing done) and returns a closure that runs the op once on
    it. The benchmark captures as many copies as it takes to exceed the L2 cache several times into
    one CUDA graph, so that every call finds its weights in memory, not in the cache.

    ``nbytes``: fewest bytes one call must move (weights, caches and activations read or written
    once). ``flops``: useful floating-point operations (2 per multiply-add). ``resident_bytes``:
    device memory of one copy.
    """

    op: str
    name: str
    make: Callable[[int], Callable[[], object]]
    nbytes: int
    flops: int
    resident_bytes: int
