"""A warp: its registers, its diverged lanes and the step from one instruction to the next.

Lanes at different instructions form fragments. One of them runs, the first or the last one in the
text, as the schedule wants it; fragments that meet become one. An instruction of the whole warp
waits until all of its lanes came, and while a fragment waits the others go on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.faults import NotConverged, TooEarly
from tests.ptx.rows import ALL, LANES, Array, Mask, Rows, lanes
from tests.ptx.stretches import Stretch
from tests.ptx.syntax import Register

if TYPE_CHECKING:
    from tests.ptx.cluster import Block
    from tests.ptx.program import Program, Step

_NONE = np.zeros(LANES, bool)
_ALL_BYTES = ALL.tobytes()
_NONE_BYTES = _NONE.tobytes()
# Says whether a warp that had to wait may try its instruction again.
Wait = Callable[[], bool]


def _never() -> bool:
    """What lanes wait for at an instruction of the whole warp: that others join them."""
    return False


@dataclass
class _Fragment:
    """Lanes that stand at an instruction; ``wait`` is what they wait for.

    ``timed``: the instruction may also end without it.
    """

    pc: int
    mask: Mask
    wait: Wait | None = None
    timed: bool = False


class Warp:
    """32 lanes of a block."""

    def __init__(self, block: "Block", index: int, program: "Program"):
        self.block = block
        self.index = index
        self.program = program
        self.classes = program.layout.classes()
        self.rows = Rows(self.classes)
        self.local = np.empty((LANES, program.layout.local_bytes), np.uint8)
        self.priority = 0.0
        # The rows of the stretches that it has executed.
        self.stretches: dict[Stretch, list[Array]] = {}

    def start(self) -> None:
        """Everything as at the launch: poison, and all lanes at the first instruction."""
        for kind, rows in self.program.poisoned.items():
            np.copyto(self.classes[kind], rows)
        for name, row in self.program.layout.specials:
            self.rows["u32", row][:] = self.block.special(name, self.index)
        for ptx_type, row, address in self.program.layout.shared_addresses:
            self.rows[ptx_type, row][:] = address | self.block.rank << 24
        self.local[:] = 0xFF
        self.pc = 0
        self.mask: Mask = True
        self.parked: list[_Fragment] = []
        self.ended = False
        self.blocked: Wait | None = None
        # Whether the instruction that waits may also end without what it waits for, and must.
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
        """Up to ``turn`` instructions and the rest of a stretch, fewer where the warp ends or must
        wait.
        """
        steps = self.program.steps
        stretches = self.program.stretches
        end = self.block.cluster.executed + turn
        if self.parked:
            self._park_or_block(None)
        while self.block.cluster.executed < end:
            stretch = stretches[self.pc]
            if stretch is not None and not self._busy(stretch):
                self._run_through(stretch)
                continue
            step = steps[self.pc]
            if not self._step(step) or (stop_at_signals and step.signal):
                return

    def _busy(self, stretch: Stretch) -> bool:
        """Whether something asynchronous uses its registers."""
        registers = stretch.registers
        return bool(self.written or self.read) and not (
            registers.isdisjoint(self.written) and registers.isdisjoint(self.read)
        )

    def _run_through(self, stretch: Stretch) -> None:
        stretch.run(self, self.mask)
        self.block.cluster.executed += stretch.count
        self.timed = False
        self._advance(self.pc + stretch.count)

    def _step(self, step: "Step") -> bool:
        """One instruction; whether the warp may go on."""
        self.block.cluster.executed += 1
        mask = self.mask if step.guard is None else self._guarded(step, step.guard)
        if mask is False:
            self._advance(self.pc + 1)
            return True
        if step.handler is None:
            return self._jump(step, mask)
        together = not step.whole or not (self.parked or mask is not self.mask)
        if not together and not self._complete(step, mask):
            return self._park_or_block(_never)
        if (self.written or self.read) and self._in_flight(step, mask):
            return True
        wait = step.handler(self, mask)
        if wait is not None:
            return self._park_or_block(wait)
        self.timed = False
        self.pc += 1
        if self.parked:
            self._meet()
        return True

    def _complete(self, step: "Step", mask: Mask) -> bool:
        """Whether every lane that takes part in an instruction of the warp has come."""
        missing = step.members & self.living() & ~lanes(mask)
        if (missing & self.mask).any():
            raise NotConverged(f"only some lanes execute an instruction of the warp: {self}")
        return not missing.any()

    def _park_or_block(self, wait: Wait | None) -> bool:
        """The lanes here wait (or, with None, have waited): others go on, or nobody can."""
        if not self.parked:
            self.blocked = wait
            return False
        fragments = [*self.parked, _Fragment(self.pc, self.mask, wait, self.timed)]
        self.timed = False
        free = [f for f in fragments if f.wait is None or f.wait()]
        if not free and self.timed_out:
            free = [f for f in fragments if f.timed]
        if free:
            self._continue(fragments, free)
            return True
        waits = [f.wait for f in fragments if f.wait is not None and f.wait is not _never]
        if not waits:
            texts = {self.program.steps[f.pc].instruction.text[:60] for f in fragments}
            raise NotConverged(f"lanes wait for each other at {sorted(texts)}: {self}")
        self.parked = fragments[:-1]
        # What waits here is asked again with the others.
        self.parked.append(fragments[-1])
        self.pc, self.mask = self.parked[0].pc, self.parked[0].mask
        del self.parked[0]
        self.blocked = lambda: any(wait() for wait in waits)
        return False

    def _continue(self, fragments: list[_Fragment], free: list[_Fragment]) -> None:
        """The first or the last of the free fragments goes on."""
        choose = max if self.block.cluster.last_lanes_first else min
        chosen = choose(free, key=lambda fragment: fragment.pc)
        self.pc = chosen.pc
        self.mask = chosen.mask
        self.parked = [f for f in fragments if f is not chosen]

    def _guarded(self, step: "Step", guard: int) -> Mask:
        """The lanes that execute a guarded instruction; False where none does."""
        predicate = self.rows["pred", guard]
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
        """Joins the lanes that stand at one instruction, and chooses who goes on."""
        for fragment in self.parked:
            if fragment.pc == self.pc:
                self.mask = _joined(self.mask, fragment.mask)
                self.parked.remove(fragment)
                break
        free = [f for f in self.parked if f.wait is None]
        last = self.block.cluster.last_lanes_first
        if all(self.pc > f.pc if last else self.pc < f.pc for f in free):
            return
        here = _Fragment(self.pc, self.mask)
        self._continue([*self.parked, here], [*free, here])

    def _jump(self, step: "Step", mask: Mask) -> bool:
        """A branch, or the end of the lanes in the mask."""
        rest = None if mask is self.mask else _without(self.mask, mask)
        if step.target is not None:
            if rest is not None:
                self._leave(_Fragment(self.pc + 1, rest))
            self.mask = mask
            self._advance(step.target)
            return True
        if rest is not None:
            self.mask = rest
            self._advance(self.pc + 1)
            return True
        if not self.parked:
            self.ended = True
            self.block.running_warps -= 1
            return False
        # Lanes that waited for those that have ended try again.
        for fragment in self.parked:
            fragment.wait = None if fragment.wait is _never else fragment.wait
        last = self.parked.pop()
        self.pc = last.pc
        self.mask = last.mask
        return self._park_or_block(last.wait) if self.parked else self._alone(last.wait)

    def _alone(self, wait: Wait | None) -> bool:
        self.blocked = wait
        return wait is None

    def _leave(self, fragment: _Fragment) -> None:
        """Parks lanes, with those that stand at the same instruction."""
        for other in self.parked:
            if other.pc == fragment.pc:
                other.mask = _joined(other.mask, fragment.mask)
                other.wait = None
                return
        self.parked.append(fragment)

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

    @property
    def may_time_out(self) -> bool:
        """Whether lanes wait for something that they need not get."""
        return self.timed or any(fragment.timed for fragment in self.parked)

    def living(self) -> Array:
        """The lanes that have not ended."""
        alive = _NONE.copy()
        if not self.ended:
            alive |= self.mask
            for fragment in self.parked:
                alive |= fragment.mask
        return alive


def _joined(a: Mask, b: Mask) -> Mask:
    both = np.logical_or(a, b)
    return True if both.all() else both


def _without(mask: Mask, part: Mask) -> Array | None:
    """The lanes of a mask outside a part, None where there are none."""
    rest = np.logical_and(mask, np.logical_not(part))
    return rest if rest.any() else None
