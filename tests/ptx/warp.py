"""A warp: its registers, its diverged lanes and the step from one instruction to the next.

Lanes at different instructions form fragments. The fragment with the lowest instruction runs first;
fragments that meet become one. An instruction of the whole warp waits until all of its lanes came.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.faults import NotConverged, NotOneThread, TooEarly
from tests.ptx.operands import ALL, LANES, Array, Mask, Rows, lanes
from tests.ptx.syntax import Register

if TYPE_CHECKING:
    from tests.ptx.cluster import Block
    from tests.ptx.program import Program, Step

_NONE = np.zeros(LANES, bool)
_ALL_BYTES = ALL.tobytes()
_NONE_BYTES = _NONE.tobytes()
# Says whether a warp that had to wait may try its instruction again.
Wait = Callable[[], bool]


class Warp:
    """32 lanes of a block."""

    def __init__(self, block: "Block", index: int, program: "Program"):
        self.block = block
        self.index = index
        self.program = program
        self.classes = program.layout.classes()
        self.rows = Rows(self.classes)
        self.priority = 0.0

    def start(self) -> None:
        """Everything as at the launch: poisoned registers, all lanes at the first instruction."""
        for kind, rows in self.program.poisoned.items():
            np.copyto(self.classes[kind], rows)
        for name, row in self.program.layout.specials:
            self.rows["u32"][row][:] = self.block.special(name, self.index)
        for ptx_type, row, address in self.program.layout.shared_addresses:
            self.rows[ptx_type][row][:] = address | self.block.rank << 24
        self.pc = 0
        self.mask: Mask = True
        self.parked: list[tuple[int, Mask]] = []
        self.ended = False
        self.blocked: Wait | None = None
        # Whether the instruction that waits may also end without what it waits for.
        self.timed = False
        self.timed_out = False
        self.registers = self.program.registers_per_thread
        # Registers that an asynchronous instruction still writes or reads, and which.
        self.written: dict[Register, str] = {}
        self.read: dict[Register, str] = {}
        # Moves out of registers that tcgen05.ld still writes.
        self.deferred: list[Callable[[], None]] = []
        # What the units that work on behalf of this warp keep about it.
        self.state: dict[str, Any] = {}
        # What the copies to global memory keep, by lane.
        self.stores: dict[int, Any] = {}

    def __str__(self) -> str:
        text = self.program.steps[self.pc].instruction.text
        return f"block {self.block.rank} warp {self.index} at {text[:100]}"

    def run(self, turn: int, stop_at_signals: bool) -> None:
        """Up to ``turn`` instructions, fewer where the warp ends or must wait."""
        steps = self.program.steps
        for _ in range(turn):
            step = steps[self.pc]
            if not self._step(step) or (stop_at_signals and step.signal):
                return

    def _step(self, step: "Step") -> bool:
        """One instruction; whether the warp may go on."""
        self.block.cluster.executed += 1
        mask = self._guarded(step)
        if mask is False:
            self._advance(self.pc + 1)
            return True
        if step.handler is None:
            return self._jump(step, mask)
        if step.whole and self.parked:
            self._wait_for_the_others(step)
            return not self.ended
        if (self.written or self.read) and self._in_flight(step, mask):
            return True
        wait = step.handler(self, mask)
        if wait is not None:
            self.blocked = wait
            return False
        self.timed = False
        self._advance(self.pc + 1)
        return True

    def _guarded(self, step: "Step") -> Mask:
        """The lanes that execute the instruction; False where none does."""
        if step.guard is None:
            return self.mask
        predicate = self.rows["pred"][step.guard]
        found = predicate.tobytes()
        if self.mask is True and found == (_NONE_BYTES if step.negated else _ALL_BYTES):
            return True
        mask = (~predicate if step.negated else predicate) & self.mask
        return False if mask.tobytes() == _NONE_BYTES else mask

    def _advance(self, pc: int) -> None:
        self.pc = pc
        if self.parked:
            self._meet()

    def _meet(self) -> None:
        """Joins the lanes that stand at one instruction; the lowest ones go on."""
        waiting: dict[int, Mask] = {self.pc: self.mask}
        for pc, mask in self.parked:
            waiting[pc] = _joined(waiting[pc], mask) if pc in waiting else mask
        self.pc = min(waiting)
        self.mask = waiting.pop(self.pc)
        self.parked = list(waiting.items())

    def _jump(self, step: "Step", mask: Mask) -> bool:
        """A branch, or the end of the lanes in the mask."""
        rest = _without(self.mask, mask)
        if step.target is not None:
            if rest is not None:
                self.parked.append((self.pc + 1, rest))
            self.mask = mask
            self._advance(step.target)
            return True
        if rest is not None:
            self.mask = rest
            self._advance(self.pc + 1)
            return True
        if not self.parked:
            self.ended = True
            return False
        self.pc, self.mask = self.parked.pop()
        self._meet()
        return True

    def _wait_for_the_others(self, step: "Step") -> None:
        """Parks the lanes that are here and runs the next ones."""
        others = [fragment for fragment in self.parked if fragment[0] != self.pc]
        ahead = min(pc for pc, _ in others)
        if all(self.program.steps[pc].whole for pc, _ in others):
            raise NotConverged(
                f"{self}: other lanes wait at {self.program.steps[ahead].instruction.text}"
            )
        self.parked.append((self.pc, self.mask))
        self.pc, self.mask = next(f for f in others if not self.program.steps[f[0]].whole)
        self.parked = [f for f in self.parked if f[0] != self.pc]

    def _in_flight(self, step: "Step", mask: Mask) -> bool:
        """Refuses what touches registers in flight; whether a move was put off."""
        written = self.written.keys() & step.uses
        if written and not step.chains:
            if not step.is_move:
                busy = ", ".join(sorted(f"{r.name} of {self.written[r]}" for r in written))
                raise TooEarly(f"{self} uses {busy[:200]} before the wait for it")
            self._defer(step, mask)
            return True
        read = self.read.keys() & step.sets
        if read:
            busy = ", ".join(sorted(f"{r.name} of {self.read[r]}" for r in read))
            raise TooEarly(f"{self} overwrites {busy[:200]} before the wait for it")
        return False

    def _defer(self, step: "Step", mask: Mask) -> None:
        """What a move copies on its way is on its way itself."""
        assert step.handler is not None
        handler = step.handler
        self.deferred.append(lambda: handler(self, mask))
        self.written.update(dict.fromkeys(step.sets, "tcgen05.ld"))
        self._advance(self.pc + 1)

    def living(self) -> Array:
        """The lanes that have not ended."""
        alive = _NONE.copy()
        if not self.ended:
            alive |= self.mask
            for _, mask in self.parked:
                alive |= mask
        return alive


def only(values: Array, mask: Mask) -> int:
    """The value of the one lane that executes an instruction."""
    (active,) = np.nonzero(lanes(mask))
    if active.size != 1:
        raise NotOneThread(f"an instruction of one thread in {active.size}")
    return int(values[active[0]])


def first(values: Array, mask: Mask) -> int:
    """The value of the first active lane."""
    return int(values[0 if mask is True else int(np.argmax(mask))])


def whole(warp: Warp, mask: Mask, what: str) -> None:
    """Refuses an instruction of all lanes in a part of them."""
    if mask is not True:
        raise NotConverged(f"{what} by a part of the warp: {warp}")


def _joined(a: Mask, b: Mask) -> Mask:
    both = np.logical_or(a, b)
    return True if both.all() else both


def _without(mask: Mask, part: Mask) -> Array | None:
    """The lanes of a mask outside a part, None where there are none."""
    rest = np.logical_and(mask, np.logical_not(part))
    return rest if rest.any() else None
