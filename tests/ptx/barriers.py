"""mbarriers, named barriers, cluster barriers, and the registers that setmaxnreg moves."""

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.convergence import common
from tests.ptx.faults import NotConverged, RegisterBudget, TooManyArrivals, Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Mask, Source, lanes
from tests.ptx.scalar import Build, Handler, constant, nothing
from tests.ptx.syntax import Instruction
from tests.ptx.warp import Wait

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

_NO_PHASE = -1


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes have come."""

    def __init__(self, count: int, name: str):
        self.count = count
        self.name = name
        self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1) -> None:
        """``count`` arrivals."""
        self.pending -= count
        if self.pending < 0:
            raise TooManyArrivals(f"{self.name}: phase {self.phase} expects {self.count} arrivals")
        self._end()

    def expect(self, count: int) -> None:
        """Announces bytes of this phase."""
        self.bytes += count
        self._end()

    def complete(self, count: int) -> None:
        """Announced bytes have come."""
        self.bytes -= count
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


def _init(instruction: Instruction, layout: Layout) -> Handler:
    where = layout.address(instruction.operands[0])
    count = layout.source(instruction.operands[1], "u32")

    def run(warp: "Warp", mask: Mask) -> None:
        # Every lane may have a barrier of its own.
        addresses, counts = where(warp), count(warp)
        for lane in np.flatnonzero(lanes(mask)):
            warp.block.cluster.set_barrier(int(addresses[lane]), int(counts[lane]))

    return run


def _invalidate(instruction: Instruction, layout: Layout) -> Handler:
    where = layout.address(instruction.operands[0])

    def run(warp: "Warp", mask: Mask) -> None:
        warp.block.cluster.drop_barrier(common(where(warp), mask))

    return run


def _arrive(instruction: Instruction, layout: Layout) -> Handler:
    """Every active lane arrives; with expect_tx it announces bytes first."""
    if "noComplete" in instruction.parts:
        raise Unsupported(instruction.text)
    # The state that an arrival returns is not modelled: nobody waits for it.
    where = layout.address(instruction.operands[1])
    more = instruction.operands[2:]
    number = layout.source(more[0], "u32") if more else None
    announces = "expect_tx" in instruction.parts

    def run(warp: "Warp", mask: Mask) -> None:
        addresses = where(warp)
        for lane in np.flatnonzero(lanes(mask)):
            barrier = warp.block.cluster.barrier(int(addresses[lane]), warp)
            count = int(number(warp)[lane]) if number else 1
            if announces:
                barrier.expect(count)
            barrier.arrive(1 if announces else count)
        warp.block.cluster.progress += 1

    return run


def _expect(instruction: Instruction, layout: Layout) -> Handler:
    where = layout.address(instruction.operands[0])
    number = layout.source(instruction.operands[1], "u32")

    def run(warp: "Warp", mask: Mask) -> None:
        for lane in np.flatnonzero(lanes(mask)):
            barrier = warp.block.cluster.barrier(int(where(warp)[lane]), warp)
            barrier.expect(int(number(warp)[lane]))

    return run


def _wait(instruction: Instruction, layout: Layout) -> Handler:
    """try_wait and test_wait by parity: whether the phase of that parity has ended.

    Both wait as long as anything else can happen, and then say no; test_wait may say no at once.
    """
    may_refuse = "test_wait" in instruction.parts
    if "parity" not in instruction.parts:
        raise Unsupported(instruction.text)
    write = layout.target(instruction.operands[0], "pred")
    where = layout.address(instruction.operands[1])
    parity = layout.source(instruction.operands[2], "u32")

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        # Lanes of different turns of a loop may meet here, each with its own barrier.
        active = np.flatnonzero(lanes(mask))
        pairs = set(
            zip(where(warp)[active].tolist(), (parity(warp)[active] & 1).tolist(), strict=True)
        )
        cluster = warp.block.cluster
        waited = [(cluster.barrier(address, warp), phase, address) for address, phase in pairs]

        def any_ended() -> bool:
            return any(barrier.phase & 1 != phase for barrier, phase, _ in waited)

        refused = may_refuse and cluster.choices.one((True, False))
        if not (any_ended() or warp.timed_out or refused):
            warp.timed = True
            return any_ended
        ended = np.zeros(LANES, bool)
        for barrier, phase, address in waited:
            mine = (where(warp) == address) & (parity(warp) & 1 == phase)
            ended |= mine & (barrier.phase & 1 != phase)
        write(warp, ended, mask)
        warp.timed_out = False
        return None

    return run


class NamedBarrier:
    """A barrier of a block with a number: bar.sync, bar.red and bar.arrive."""

    def __init__(self) -> None:
        self.arrived = 0
        self.phase = 0
        self.any_yet = False
        # Of the last phase: whether the predicate of any thread was true.
        self.any = False

    def arrive(self, threads: int, expected: int, predicate: bool = False) -> None:
        """Threads that arrive; the phase ends with the last."""
        self.arrived += threads
        self.any_yet |= predicate
        if self.arrived > expected:
            raise TooManyArrivals(f"named barrier: {self.arrived} of {expected} threads")
        if self.arrived == expected:
            self.any, self.any_yet = self.any_yet, False
            self.arrived = 0
            self.phase += 1


def _named(instruction: Instruction, layout: Layout) -> Handler:
    reduces = {"red", "or", "pred"} <= set(instruction.parts)
    waits = "sync" in instruction.parts or reduces
    if not waits and "arrive" not in instruction.parts:
        raise Unsupported(instruction.text)
    operands = instruction.operands
    write = layout.target(operands[0], "pred") if reduces else None
    predicate = layout.source(operands[-1], "pred") if reduces else None
    numbers = operands[1:-1] if reduces else operands
    number = layout.source(numbers[0], "u32")
    more = numbers[1:]
    threads: Source | None = layout.source(more[0], "u32") if more else None

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        barrier = warp.block.named_barrier(common(number(warp), mask))
        if "named" not in warp.state:
            everyone = warp.block.live_threads()
            expected = common(threads(warp), mask) if threads else everyone
            warp.state["named"] = barrier.phase
            mine = predicate is not None and bool((predicate(warp) & lanes(mask)).any())
            barrier.arrive(LANES if threads else int(lanes(mask).sum()), expected, mine)
            warp.block.cluster.progress += 1
        phase = warp.state["named"]

        def ended() -> bool:
            return barrier.phase > phase

        if not waits or ended():
            del warp.state["named"]
            if write is not None:
                write(warp, np.full(LANES, barrier.any), mask)
            return None
        return ended

    return run


def _warp_sync(instruction: Instruction, layout: Layout) -> Handler:
    """bar.warp.sync; the step waits for the other lanes."""
    return nothing(instruction, layout)


def _cluster(instruction: Instruction, layout: Layout) -> Handler:
    if "arrive" in instruction.parts:
        return _arrive_at_cluster
    if "wait" in instruction.parts:
        return _wait_for_cluster
    raise Unsupported(instruction.text)


def _arrive_at_cluster(warp: "Warp", mask: Mask) -> None:
    """Every lane arrives for itself."""
    cluster = warp.block.cluster
    arrived = cluster.arrived.setdefault(warp, np.zeros(LANES, bool))
    if (arrived & mask).any():
        raise TooManyArrivals(f"second arrival at the cluster barrier: {warp}")
    arrived |= mask
    phases = warp.state.setdefault("cluster", np.full(LANES, _NO_PHASE))
    phases[lanes(mask)] = cluster.phase
    cluster.end_phase()


def _wait_for_cluster(warp: "Warp", mask: Mask) -> Wait | None:
    cluster = warp.block.cluster
    phases = warp.state.get("cluster", np.full(LANES, _NO_PHASE))
    phase = int(phases[lanes(mask)].max())
    if phases[lanes(mask)].min() == _NO_PHASE:
        raise NotConverged(f"wait at the cluster barrier without an arrival: {warp}")

    def ended() -> bool:
        return cluster.phase > phase

    if ended():
        phases[lanes(mask)] = _NO_PHASE
        return None
    return ended


def _registers(instruction: Instruction, layout: Layout) -> Handler:
    """setmaxnreg: a warp gives registers to the block's pool, or waits until it has enough."""
    count = constant(instruction, 0)
    takes = "inc" in instruction.parts
    if count % 8 or not 24 <= count <= 256:
        raise Unsupported(instruction.text)

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        more = LANES * (count - warp.registers)
        if not takes and more > 0:
            raise RegisterBudget(f"setmaxnreg.dec to {count} from {warp.registers}: {warp}")
        block = warp.block

        def available() -> bool:
            return more <= block.free_registers

        if not available():
            return available
        block.free_registers -= more
        warp.registers = count
        block.cluster.progress += 1
        return None

    return run


BUILDS: dict[str, Build] = {
    "mbarrier.init": _init,
    "mbarrier.inval": _invalidate,
    "mbarrier.arrive": _arrive,
    "mbarrier.expect_tx": _expect,
    "mbarrier.try_wait": _wait,
    "mbarrier.test_wait": _wait,
    "bar": _named,
    "bar.warp": _warp_sync,
    "barrier": _named,
    "barrier.cluster": _cluster,
    "setmaxnreg": _registers,
    "griddepcontrol": nothing,
}
