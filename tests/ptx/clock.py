"""%clock64, which a warp reads while it looks for what others do."""

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Mask
from tests.ptx.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptx.scalar import Handler
    from tests.ptx.warp import Wait, Warp

CLOCK = "%clock64"


def read(instruction: Instruction, layout: Layout) -> "Handler":
    """mov from the clock: the warp instructions of the cluster so far, a number that grows.

    A loop that looks at memory until its deadline reads the clock at every turn. It has nothing new
    to see before another warp has done something, and waits that long: so nobody starves, and a
    loop without an end is a deadlock.
    """
    write = layout.target(instruction.operands[0], "u64")

    def run(warp: "Warp", mask: Mask) -> "Wait | None":
        cluster = warp.block.cluster
        seen = warp.state.get(CLOCK)
        if seen == cluster.progress and not warp.timed_out:
            warp.timed = True
            return lambda: cluster.progress != seen
        warp.timed_out = False
        warp.state[CLOCK] = cluster.progress
        write(warp, np.full(LANES, cluster.executed, np.uint64), mask)
        return None

    return run
