"""red: what threads add to a word of memory, one after another."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.faults import Unsupported
from tests.ptx.load_store import read, state_space, write
from tests.ptx.operands import DTYPES, Layout, Mask, lanes
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


def _reduce(instruction: Instruction, layout: Layout) -> Handler:
    ptx_type = instruction.parts[-1]
    operation = _OPERATIONS.get(instruction.parts[-2])
    if operation is None or ptx_type not in ("u32", "s32", "b32", "u64", "s64", "b64"):
        raise Unsupported(instruction.text)
    dtype = np.dtype(DTYPES[ptx_type])
    where = layout.address(instruction.operands[0])
    value = layout.source(instruction.operands[1], ptx_type)
    memory = state_space(instruction)

    def run(warp: "Warp", mask: Mask) -> None:
        for lane in np.flatnonzero(lanes(mask)):
            address = where(warp)[lane : lane + 1]
            old = read(warp, memory, address, dtype.itemsize).view(dtype)
            new = operation(old, value(warp)[lane : lane + 1])
            write(warp, memory, address, new.view(np.uint8))

    return run


BUILDS: dict[str, Build] = {"red": _reduce}
