"""red and atom: what threads do to a word of memory, one after another."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.load_store import read, state_space, write
from tests.ptx.operands import Layout
from tests.ptx.rows import DTYPES, LANES, Mask, lanes
from tests.ptx.scalar import Build, Handler
from tests.ptx.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _on_memory(instruction: Instruction, layout: Layout, returns: bool) -> Handler:
    ptx_type = instruction.parts[-1]
    operation = _OPERATIONS.get(instruction.parts[-2])
    if operation is None or ptx_type not in ("u32", "s32", "b32", "u64", "s64", "b64"):
        raise Unsupported(instruction.text)
    dtype = np.dtype(DTYPES[ptx_type])
    *results, address_operand, value_operand = instruction.operands
    where = layout.address(address_operand)
    value = layout.source(value_operand, ptx_type)
    keep = layout.target(results[0], ptx_type) if returns else None
    memory = state_space(instruction)

    def run(warp: "Warp", mask: Mask) -> None:
        found = np.zeros(LANES, dtype)
        for lane in np.flatnonzero(lanes(mask)):
            address = where(warp)[lane : lane + 1]
            old = read(warp, memory, address, dtype.itemsize).view(dtype).reshape(1)
            found[lane] = old[0]
            new = operation(old, value(warp)[lane : lane + 1])
            write(warp, memory, address, new.view(np.uint8).reshape(1, -1))
        if keep is not None:
            keep(warp, found, mask)

    return run


def _red(instruction: Instruction, layout: Layout) -> Handler:
    return _on_memory(instruction, layout, returns=False)


def _atom(instruction: Instruction, layout: Layout) -> Handler:
    return _on_memory(instruction, layout, returns=True)


BUILDS: dict[str, Build] = {"red": _red, "atom": _atom}
