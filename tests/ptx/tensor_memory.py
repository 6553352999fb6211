"""Tensor memory: allocation, and what warps read from it and write to it."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.convergence import common
from tests.ptx.faults import BeyondAllocation, TooEarly, Unsupported, WrongQuarter
from tests.ptx.memory import bytes_at
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask
from tests.ptx.scalar import Build, Handler, nothing
from tests.ptx.syntax import Instruction, Vector, registers_in
from tests.ptx.warp import Wait

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

COLUMNS = 512
ROWS = 128


class TensorMemory:
    """128 lanes of 512 32-bit columns, poisoned."""

    def __init__(self) -> None:
        self.content = np.empty((ROWS, COLUMNS), np.uint32)
        # Cells that a warp has stored to and not waited for.
        self.unfinished = np.zeros((ROWS, COLUMNS), bool)
        self.reset()

    def reset(self) -> None:
        """As at the start of a block."""
        self.content[:] = 0xFFFFFFFF
        self.unfinished[:] = False
        self.ranges: list[tuple[int, int]] = []
        self.permitted = True

    @property
    def allocated(self) -> int:
        """Columns that are allocated."""
        return sum(count for _, count in self.ranges)

    def allocate(self, count: int) -> int | None:
        """The first of ``count`` columns, the highest free ones; None where too few are free."""
        for start in range(COLUMNS - count, -1, -count):
            if all(start + count <= low or low + size <= start for low, size in self.ranges):
                self.ranges.append((start, count))
                return start
        return None

    def free(self, start: int, count: int) -> None:
        """Gives back columns as they were allocated."""
        if (start, count) not in self.ranges:
            raise BeyondAllocation(f"dealloc of {count} columns from {start}: {self.ranges}")
        self.ranges.remove((start, count))

    def read(self, rows: Array, columns: Array, what: str) -> Array:
        """Cells of allocated columns whose stores have been waited for."""
        self._check(columns, what)
        if self.unfinished[rows, columns].any():
            raise TooEarly(f"{what} reads what tcgen05.st wrote before tcgen05.wait::st")
        return self.content[rows, columns]

    def write(self, rows: Array, columns: Array, values: Array, what: str) -> None:
        """Writes cells of allocated columns."""
        self._check(columns, what)
        self.content[rows, columns] = values

    def block(self, column: int, count: int, what: str) -> Array:
        """uint32 ``[128, count]``: all lanes of some columns."""
        rows, columns = np.ogrid[:ROWS, column : column + count]
        return self.read(rows, columns, what)

    def set_block(self, column: int, values: Array, what: str) -> None:
        """Writes all lanes of some columns."""
        rows, columns = np.ogrid[:ROWS, column : column + values.shape[1]]
        self.write(rows, columns, values, what)

    def _check(self, columns: Array, what: str) -> None:
        low = int(columns.min())
        high = int(columns.max())
        if not any(start <= low and high < start + count for start, count in self.ranges):
            raise BeyondAllocation(f"{what}: columns {low} to {high} of {self.ranges}")


def _allocate(instruction: Instruction, layout: Layout) -> Handler:
    """tcgen05.alloc, which for a pair of blocks does not wait for the other one.

    It may take as long as anything else can happen.
    """
    where = layout.address(instruction.operands[0])
    number = layout.source(instruction.operands[1], "u32")

    def run(warp: "Warp", mask: Mask) -> Wait | None:
        started = warp.state.setdefault("allocation", [])
        if not started and not warp.block.cluster.choices.early():
            warp.block.cluster.asynchronous.add_last(lambda: started.append(True))
            return lambda: bool(started)
        memory = warp.block.tensor_memory
        count = common(number(warp), mask)
        if count not in (32, 64, 128, 256, 512) or not memory.permitted:
            raise BeyondAllocation(f"{warp}: {count} columns, permitted {memory.permitted}")
        start = memory.allocate(count)
        if start is None:
            return lambda: memory.allocated + count <= COLUMNS
        del warp.state["allocation"]
        address = where(warp)[:1]
        shared, first = warp.block.cluster.shared(address, 4, str(warp))
        shared.content[bytes_at(first, 4)] = np.array([start], np.uint32).view(np.uint8)
        warp.block.cluster.progress += 1
        return None

    return run


def _free(instruction: Instruction, layout: Layout) -> Handler:
    address = layout.source(instruction.operands[0], "u32")
    number = layout.source(instruction.operands[1], "u32")

    def run(warp: "Warp", mask: Mask) -> None:
        memory = warp.block.tensor_memory
        memory.free(common(address(warp), mask), common(number(warp), mask))
        warp.block.cluster.progress += 1

    return run


def _relinquish(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        warp.block.tensor_memory.permitted = False

    return run


def cells(shape: str, registers: int) -> tuple[Array, Array]:
    """(lane, column) ``[registers, 32]`` of each thread's registers, from the address on.

    32x32b: a lane per thread, a column per register. 16x128b: register r of thread t is lane
    t / 4 + 8 (r % 2), column t % 4 + 4 (r / 2). 16x256b: lane t / 4 + 8 (r / 2 % 2), column
    2 (t % 4) + r % 2 + 8 (r / 4).
    """
    r = np.arange(registers)[:, None]
    t = np.arange(LANES)[None]
    if shape == "32x32b":
        return t + 0 * r, r + 0 * t
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    if shape == "16x256b":
        return t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    raise Unsupported(f"tensor memory shape {shape}")


def _shape(instruction: Instruction) -> str:
    if any(part.startswith(("pack", "unpack", "red")) for part in instruction.parts):
        raise Unsupported(instruction.text)
    return next(part for part in instruction.parts if re.fullmatch(r"\d+x\d+b(x2)?", part))


def _items(operand: object) -> tuple[object, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _places(warp: "Warp", address: int, shape: tuple[Array, Array]) -> tuple[Array, Array]:
    """Lanes and columns that a warp may touch: those of its quarter of the lanes."""
    rows = (address >> 16) + shape[0]
    quarter = warp.index % 4
    if (rows // 32 != quarter).any():
        raise WrongQuarter(f"lanes {rows.min()} to {rows.max()} by {warp}")
    return rows, (address & 0xFFFF) + shape[1]


def _load(instruction: Instruction, layout: Layout) -> Handler:
    """tcgen05.ld: the registers have their values after tcgen05.wait::ld."""
    targets = _items(instruction.operands[0])
    shape = cells(_shape(instruction), len(targets))
    writes = [layout.target(target, "b32") for target in targets]  # type: ignore[arg-type]
    registers = registers_in(targets)  # type: ignore[arg-type]
    where = layout.address(instruction.operands[1])

    def run(warp: "Warp", mask: Mask) -> None:
        rows, columns = _places(warp, common(where(warp), mask), shape)
        memory = warp.block.tensor_memory
        what = str(warp)
        early = None
        if warp.block.cluster.choices.early():
            early = memory.read(rows, columns, what)

        def arrive() -> None:
            values = memory.read(rows, columns, what) if early is None else early
            for write, value in zip(writes, values, strict=True):
                write(warp, value, True)

        warp.deferred.append(arrive)
        warp.written.update(dict.fromkeys(registers, "tcgen05.ld"))

    return run


def _wait_for_loads(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        _do_all(warp.deferred)
        done = [r for r, what in warp.written.items() if what == "tcgen05.ld"]
        for register in done:
            del warp.written[register]

    return run


def _do_all(work: list[Callable[[], None]]) -> None:
    for one in work:
        one()
    work.clear()


def _store(instruction: Instruction, layout: Layout) -> Handler:
    """tcgen05.st: others see the values after tcgen05.wait::st."""
    sources = _items(instruction.operands[1])
    shape = cells(_shape(instruction), len(sources))
    reads = [layout.source(source, "b32") for source in sources]  # type: ignore[arg-type]
    where = layout.address(instruction.operands[0])

    def run(warp: "Warp", mask: Mask) -> None:
        rows, columns = _places(warp, common(where(warp), mask), shape)
        memory = warp.block.tensor_memory
        values = np.stack([read(warp) for read in reads])
        what = str(warp)
        if warp.block.cluster.choices.early():
            memory.write(rows, columns, values, what)
        memory.unfinished[rows, columns] = True

        def arrive() -> None:
            memory.write(rows, columns, values, what)
            memory.unfinished[rows, columns] = False

        warp.state.setdefault("stores to tensor memory", []).append(arrive)

    return run


def _wait_for_stores(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: "Warp", mask: Mask) -> None:
        _do_all(warp.state.get("stores to tensor memory", []))

    return run


BUILDS: dict[str, Build] = {
    "tcgen05.alloc": _allocate,
    "tcgen05.dealloc": _free,
    "tcgen05.relinquish_alloc_permit": _relinquish,
    "tcgen05.ld": _load,
    "tcgen05.st": _store,
    "tcgen05.wait::ld": _wait_for_loads,
    "tcgen05.wait::st": _wait_for_stores,
    "tcgen05.fence::before_thread_sync": nothing,
    "tcgen05.fence::after_thread_sync": nothing,
}
