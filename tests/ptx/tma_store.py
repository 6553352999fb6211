"""cp.async.bulk from shared to global memory, in groups that a thread waits for."""

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask, lanes
from tests.ptx.scalar import Build, Handler, constant
from tests.ptx.syntax import Instruction, TensorAddress
from tests.ptx.tma import OFFSET
from tests.ptx.warp import Wait

if TYPE_CHECKING:
    from tests.ptx.cluster import Cluster
    from tests.ptx.tensor_map import TensorMap
    from tests.ptx.warp import Warp


class StoreGroups:
    """The stores of one thread: committed groups, oldest first, and the group that is open.

    A store first reads shared memory and later writes global memory.
    """

    def __init__(self) -> None:
        self.open: list[Store] = []
        self.committed: list[list[Store]] = []

    def pending(self, newest: int, read: bool) -> bool:
        """Whether a group other than the newest ones is not complete (or not read)."""
        older = self.committed[: len(self.committed) - newest]
        return any(
            not (store.read if read else store.written) for group in older for store in group
        )


class Store:
    """One copy on its way."""

    def __init__(self) -> None:
        self.read = False
        self.written = False


def groups(warp: "Warp", lane: int) -> StoreGroups:
    """The groups of a lane."""
    return warp.stores.setdefault(lane, StoreGroups())


def store(instruction: Instruction, layout: Layout) -> Handler:
    """cp.async.bulk.tensor to global memory: a box."""
    if "bulk_group" not in instruction.parts or "im2col" in instruction.opcode:
        raise Unsupported(instruction.text)
    target, source = instruction.operands[:2]
    assert isinstance(target, TensorAddress)
    map_address = layout.source(target.map, "u64")
    coordinates = [layout.source(item, "s32") for item in target.coordinates]
    whence = layout.address(source)

    def run(warp: "Warp", mask: Mask) -> None:
        # Every active lane stores; what is the same in several lanes happens once.
        copies: dict[tuple[int, ...], Store] = {}
        wheres = whence(warp)
        maps = map_address(warp)
        corners = np.stack([read(warp) for read in coordinates], -1)
        for lane in np.flatnonzero(lanes(mask)):
            start = int(wheres[lane])
            corner = tuple(corners[lane].tolist())
            key = (start, int(maps[lane]), *corner)
            if key not in copies:
                copies[key] = Store()
                tensor_map = warp.block.cluster.tensor_map(int(maps[lane]))
                _send(warp.block.cluster, copies[key], tensor_map, start, corner)
            groups(warp, int(lane)).open.append(copies[key])

    return run


def _send(
    cluster: "Cluster", copy: "Store", tensor_map: "TensorMap", start: int, corner: tuple[int, ...]
) -> None:
    def read() -> None:
        places = tensor_map.places(start & OFFSET, tensor_map.box_bytes)
        data = cluster.block(start, "TMA store").memory.read_by_proxy(places, "TMA store")
        copy.read = True
        cluster.asynchronous.add(lambda: write(data))

    def write(data: Array) -> None:
        tensor_map.store(corner, cluster.memory, data)
        copy.written = True

    cluster.asynchronous.add(read)


def _commit(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        for lane in range(LANES):
            if lanes(mask)[lane] and lane in warp.stores:
                own = groups(warp, lane)
                own.committed.append(own.open)
                own.open = []

    return run


def _wait_group(instruction: Instruction, layout: Layout) -> Handler:
    newest = constant(instruction, 0)
    read = "read" in instruction.parts

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        own = [
            groups(warp, lane) for lane in range(LANES) if lanes(mask)[lane] and lane in warp.stores
        ]

        def ended() -> bool:
            return not any(group.pending(newest, read) for group in own)

        return None if ended() else ended

    return run


BUILDS: dict[str, Build] = {
    **{f"cp.async.bulk.tensor.{rank}d.global": store for rank in range(1, 6)},
    "cp.async.bulk.commit_group": _commit,
    "cp.async.bulk.wait_group": _wait_group,
}
