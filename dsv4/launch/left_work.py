"""Work that one launch leaves to a later one, off the way on which the step waits.

A launch may leave a part of its results undone. A later one that has room takes it along, or who
needs such a result makes it for itself. Where neither is so, a launch of its own does it, in front
of the first item that gets the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Argument, Item, Launch
from dsv4.launch.kernel import Shape


@dataclass(frozen=True)
class LeftWork:
    """``shape`` with ``arguments``: the launch that does nothing else. ``results``: those of the
    arguments that it writes. A launch that takes it along has the arguments too, by the same names.
    """

    shape: Shape
    arguments: dict[str, Argument]
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Left:
    """Work that the last of the first ``count`` items, ``item``, has left."""

    work: LeftWork
    item: Item
    count: int

    def is_undone(self, items: Sequence[Item]) -> bool:
        """Whether ``items`` have the one that has left it, and none that has done it."""
        if len(items) < self.count or items[self.count - 1] is not self.item:
            return False
        results = {storage_key(result) for result in self.work.results}
        launches = (item for item in items[self.count :] if isinstance(item, Launch))
        return all(results.isdisjoint(launch.written_storages) for launch in launches)
