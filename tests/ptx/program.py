"""A function's instructions with their handlers, made once and executed by every warp."""

import functools
import gc
from dataclasses import dataclass

import numpy as np

from tests.ptx import (
    alu,
    atomics,
    barriers,
    bits,
    convert,
    copies,
    exchange,
    load_store,
    mma,
    scalar,
    tensor_memory,
    tma,
    tma_store,
    umma,
    wgmma,
)
from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.parse import parse
from tests.ptx.rows import ALL, LANES, Array
from tests.ptx.scalar import Build, Handler
from tests.ptx.stretches import find_stretches
from tests.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Register,
    registers_in,
)

# Instructions whose first operand is no result.
_WITHOUT_RESULT = ("st", "stmatrix", "red", "cp", "bar", "barrier", "prefetch", "fence", "bra")
_SIGNALS = ("mbarrier", "bar", "barrier", "cp", "tcgen05", "wgmma", "fence")
# Instructions of a whole warp whose name does not say so.
_WHOLE = ("bar", "shfl", "elect", "vote", "redux", "match")
_NAMES_MEMBERS = ("shfl", "elect", "vote", "redux", "match")

BUILDS: dict[str, Build] = {
    **scalar.BUILDS,
    **alu.BUILDS,
    **bits.BUILDS,
    **convert.BUILDS,
    **exchange.BUILDS,
    **load_store.BUILDS,
    **barriers.BUILDS,
    **atomics.BUILDS,
    **copies.BUILDS,
    **tma.BUILDS,
    **tma_store.BUILDS,
    **tensor_memory.BUILDS,
    **umma.BUILDS,
    **wgmma.BUILDS,
    **mma.BUILDS,
}


@dataclass
class Step:
    """An instruction, ready to run; without a handler it is a branch or the end of the lanes."""

    instruction: Instruction
    handler: Handler | None
    guard: int | None
    negated: bool
    target: int | None
    # Whether every lane must be there, whether other warps may notice it.
    whole: bool
    members: Array
    signal: bool
    is_move: bool
    # Whether results of earlier instructions of its kind may still be on their way to it.
    chains: bool

    @functools.cached_property
    def sets(self) -> frozenset[Register]:
        """Registers written."""
        return _registers(self.instruction)[0]

    @functools.cached_property
    def uses(self) -> frozenset[Register]:
        """Registers read or written."""
        return _registers(self.instruction)[1]


class Program:
    """A function made ready; ``registers_per_thread`` is what a launch gives each thread."""

    def __init__(self, function: Function):
        self.function = function
        self.layout = Layout(function)
        self.steps = [self._step(instruction) for instruction in function.instructions]
        self.stretches = find_stretches(self.steps, set(function.labels.values()))
        self.poisoned = self.layout.classes()
        threads = 1
        directives = function.directives
        for size in directives.get("reqntid", directives.get("maxntid", ())):
            threads *= size
        most = 65536 // threads // 8 * 8
        self.registers_per_thread = directives.get("maxnreg", (min(most, 255),))[0]

    def _step(self, instruction: Instruction) -> Step:
        guard = None
        if instruction.guard is not None:
            guard = self.layout.places[instruction.guard][1]
        name = instruction.parts[0]
        handler = None
        target = None
        if name == "bra":
            label = instruction.operands[0]
            assert isinstance(label, Label)
            target = self.function.labels[label.name]
        elif name not in ("ret", "exit"):
            handler = self._handler(instruction)
        return Step(
            instruction,
            handler,
            guard,
            instruction.negated,
            target,
            "aligned" in instruction.parts or name in _WHOLE,
            _members(instruction),
            name in _SIGNALS,
            name == "mov",
            name == "wgmma",
        )

    def _handler(self, instruction: Instruction) -> Handler:
        build = find_build(instruction)
        if build is None:
            return _refuse(instruction, "unknown")
        try:
            return build(instruction, self.layout)
        except Unsupported as problem:
            return _refuse(instruction, str(problem))


def find_build(instruction: Instruction) -> Build | None:
    """What makes the handler: the longest known beginning of the opcode."""
    for count in range(min(6, len(instruction.parts)), 0, -1):
        build = BUILDS.get(".".join(instruction.parts[:count]))
        if build is not None:
            return build
    return None


def _members(instruction: Instruction) -> Array:
    """The lanes that take part: a constant last operand of what names its members says which."""
    last = instruction.operands[-1] if instruction.operands else None
    if instruction.parts[0] in _NAMES_MEMBERS and isinstance(last, Immediate):
        return (last.bits >> np.arange(LANES) & 1).astype(bool)
    return ALL


def _refuse(instruction: Instruction, reason: str) -> Handler:
    """A handler that says what is not supported when it is reached."""

    def run(warp: object, mask: object) -> None:
        raise Unsupported(f"{instruction.text}: {reason}")

    return run


def _registers(instruction: Instruction) -> tuple[frozenset[Register], frozenset[Register]]:
    """(registers written, registers read or written)."""
    everything = registers_in(instruction.operands)
    first = instruction.operands[:1]
    no_result = not first or isinstance(first[0], Address)
    if no_result or instruction.parts[0] in _WITHOUT_RESULT:
        return frozenset(), everything
    return registers_in(first), everything


@functools.cache
def load(ptx: str) -> dict[str, Program]:
    """The programs of a module by the names of their entry functions.

    They stay while the process runs, so that no later look for garbage goes through their millions
    of objects; what is garbage before them would stay too, and goes first.
    """
    gc.collect()
    programs = {name: Program(function) for name, function in parse(ptx).items()}
    gc.freeze()
    return programs
