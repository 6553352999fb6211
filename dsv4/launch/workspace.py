"""Where the buffers of a recording lie: those that are alive at the same time never overlap.

A buffer is alive from the first item that names it to the last, or to the end of the recording if
it is kept. One that was placed has memory of its own.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dsv4.integers import round_up
from dsv4.launch.buffers import storage_key
from dsv4.launch.recording import Recording

ALIGNMENT = 512


@dataclass(frozen=True)
class Layout:
    """``offsets``: of every buffer by its ``storage_key``; ``nbytes``: of the memory that they
    share.
    """

    offsets: Mapping[int, int]
    nbytes: int


@dataclass
class _Lifetime:
    nbytes: int
    first: int
    last: int


def lay_out(recording: Recording) -> Layout:
    """Places the largest buffers first, each as low as what is alive beside it allows."""
    lifetimes = _lifetimes(recording)
    # Placed intervals (begin, end), by the items during which they are alive.
    alive: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    offsets = {}
    nbytes = 0
    for key, life in sorted(lifetimes.items(), key=lambda item: -item[1].nbytes):
        items = range(life.first, life.last + 1)
        offset = 0
        for begin, end in sorted({place for item in items for place in alive[item]}):
            if begin < offset + life.nbytes and offset < end:
                offset = end
        offsets[key] = offset
        end = offset + life.nbytes
        nbytes = max(nbytes, end)
        for item in items:
            alive[item].append((offset, end))
    return Layout(offsets, nbytes)


def _lifetimes(recording: Recording) -> dict[int, _Lifetime]:
    lifetimes: dict[int, _Lifetime] = {}

    def use(tensor: Tensor, at: int) -> None:
        if recording.owns(tensor) and storage_key(tensor) not in recording.placed:
            nbytes = round_up(max(tensor.untyped_storage().nbytes(), 1), ALIGNMENT)
            lifetimes.setdefault(storage_key(tensor), _Lifetime(nbytes, at, at)).last = at

    for at, item in enumerate(recording.items):
        for tensor in item.tensors:
            use(tensor, at)
    for tensor in recording.kept:
        use(tensor, len(recording.items))
    return lifetimes
