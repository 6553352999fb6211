"""cp.async: copies of 4, 8 or 16 bytes of every lane, in groups that a thread waits for or with an
arrival at an mbarrier behind them. st.async: stores that an mbarrier counts.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.faults import Misaligned, Unsupported
from tests.ptx.load_store import write
from tests.ptx.operands import Layout
from tests.ptx.rows import Array, Mask, lanes
from tests.ptx.scalar import Build, Handler, constant
from tests.ptx.syntax import Instruction, Vector
from tests.ptx.warp import Wait

if TYPE_CHECKING:
    from tests.ptx.barriers import Barrier
    from tests.ptx.warp import Warp


class Copy:
    """The copies that an instruction began, one for every active lane.

    ``behind``: what happens with the last copy that it waits for.
    """

    def __init__(self, targets: Array, size: int) -> None:
        self.targets = targets
        self.size = size
        self.done = False
        self.behind: list[Arrival] = []

    def end(self, warp: "Warp") -> None:
        """All bytes have come."""
        self.done = True
        for arrival in self.behind:
            arrival.copies.remove(self)
            arrival.happen_if_alone(warp)


class Arrival:
    """Arrivals at mbarriers that wait for copies; what these wrote is then known to all."""

    def __init__(self, copies: list[Copy], barriers: "list[Barrier]"):
        self.written = list(copies)
        self.copies = [copy for copy in copies if not copy.done]
        self.barriers = barriers
        for copy in self.copies:
            copy.behind.append(self)

    def happen_if_alone(self, warp: "Warp") -> None:
        """Unless a copy is still on its way."""
        if self.copies:
            return
        for copy in self.written:
            memory, first = warp.block.cluster.shared(copy.targets, copy.size, warp)
            memory.announce(first, copy.size, warp.index)
        for barrier in self.barriers:
            barrier.arrive()
        warp.block.cluster.progress += 1


class Groups:
    """The copies of one lane: committed groups, oldest first, and the group that is open."""

    def __init__(self) -> None:
        self.open: list[Copy] = []
        self.committed: list[list[Copy]] = []

    def commit(self) -> None:
        """Closes the open group."""
        self.committed.append(self.open)
        self.open = []

    def complete(self, newest: int) -> bool:
        """Whether all groups but the newest ones are."""
        while len(self.committed) > newest:
            if not all(copy.done for copy in self.committed[0]):
                return False
            # Nobody has to wait for it again.
            del self.committed[0]
        return True

    def all_complete(self) -> bool:
        """Whether all copies are, also those of the open group."""
        return self.complete(0) and all(copy.done for copy in self.open)


def _groups(warp: "Warp", mask: Mask) -> list[Groups]:
    """Those of the active lanes."""
    kept: dict[int, Groups] = warp.state.setdefault("cp.async", {})
    return [kept.setdefault(int(lane), Groups()) for lane in np.flatnonzero(lanes(mask))]


def _copy(instruction: Instruction, layout: Layout) -> Handler:
    size = constant(instruction, 2)
    more = instruction.operands[3:]
    if "L2::cache_hint" in instruction.parts:
        more = more[:-1]
    if "ignore" in instruction.opcode or size not in (4, 8, 16):
        raise Unsupported(instruction.text)
    where = layout.address(instruction.operands[0])
    whence = layout.address(instruction.operands[1])
    # Bytes that come from the source, in front of zeros.
    taken = layout.source(more[0], "u32") if more else None

    def run(warp: "Warp", mask: Mask) -> None:
        active = lanes(mask)
        to, source = where(warp)[active], whence(warp)[active]
        if (source % size).any():
            raise Misaligned(f"{warp}: {size} bytes at {int(source[0]):#x}")
        counts = np.full(to.shape, size) if taken is None else taken(warp)[active]
        copy = Copy(to, size)

        def happen() -> None:
            write(warp, "shared", to, _fetch(warp, source, counts, size))
            copy.end(warp)

        warp.block.cluster.asynchronous.add(happen)
        for group in _groups(warp, mask):
            group.open.append(copy)
        warp.state.setdefault("copies without an arrival", []).append(copy)

    return run


def _fetch(warp: "Warp", source: Array, counts: Array, size: int) -> Array:
    memory = warp.block.cluster.memory
    if (counts == size).all():
        return memory.gather(source, size, "cp.async")
    values = np.zeros((source.size, size), np.uint8)
    for value, address, count in zip(values, source.tolist(), counts.tolist(), strict=True):
        if count:
            value[:count] = memory.view(address, count, "cp.async")
    return values


def _store(instruction: Instruction, layout: Layout) -> Handler:
    """What each lane stores comes when the schedule wants; the bytes are complete then."""
    ptx_type = instruction.parts[-1]
    if "mbarrier::complete_tx::bytes" not in instruction.opcode:
        raise Unsupported(instruction.text)
    where = layout.address(instruction.operands[0])
    value = instruction.operands[1]
    parts = value.items if isinstance(value, Vector) else (value,)
    sources = [layout.source(part, ptx_type) for part in parts]
    told = layout.address(instruction.operands[2])

    def run(warp: "Warp", mask: Mask) -> None:
        cluster = warp.block.cluster
        values = np.stack([source(warp) for source in sources], -1).view(np.uint8)
        for lane in np.flatnonzero(lanes(mask)):
            barrier = cluster.barrier(int(told(warp)[lane]), warp)
            to, value = where(warp)[lane : lane + 1].copy(), values[lane : lane + 1].copy()
            cluster.asynchronous.add(partial(_arrive, warp, barrier, to, value))

    return run


def _arrive(warp: "Warp", barrier: "Barrier", to: Array, value: Array) -> None:
    write(warp, "shared", to, value)
    barrier.complete(value.size)


def _commit(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        # Who waits for groups does not wait for arrivals.
        warp.state.pop("copies without an arrival", None)
        for group in _groups(warp, mask):
            group.commit()

    return run


def _wait(instruction: Instruction, layout: Layout) -> Handler:
    newest = None if "wait_all" in instruction.parts else constant(instruction, 0)

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        own = _groups(warp, mask)

        def ended() -> bool:
            return all(
                group.all_complete() if newest is None else group.complete(newest) for group in own
            )

        return None if ended() else ended

    return run


def _arrive_behind(instruction: Instruction, layout: Layout) -> Handler:
    """Every lane arrives when the copies of the warp have come; the machine does not know apart
    those of its lanes.
    """
    if "noinc" not in instruction.parts:
        raise Unsupported(instruction.text)
    where = layout.address(instruction.operands[0])

    def run(warp: "Warp", mask: Mask) -> None:
        cluster = warp.block.cluster
        active = where(warp)[lanes(mask)].tolist()
        copies = warp.state.get("copies without an arrival", [])
        # An arrival waits for all copies before it, also for those in front of another arrival.
        warp.state["copies without an arrival"] = [copy for copy in copies if not copy.done]
        Arrival(copies, [cluster.barrier(int(at), warp) for at in active]).happen_if_alone(warp)

    return run


BUILDS: dict[str, Build] = {
    "cp.async.ca": _copy,
    "cp.async.cg": _copy,
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _wait,
    "cp.async.wait_all": _wait,
    "cp.async.mbarrier.arrive": _arrive_behind,
    "st.async": _store,
}
