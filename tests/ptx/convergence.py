"""What instructions demand of the lanes that execute them."""

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.faults import NotConverged, NotOneThread
from tests.ptx.rows import Array, Mask, lanes

if TYPE_CHECKING:
    from tests.ptx.warp import Warp


def only(values: Array, mask: Mask) -> int:
    """The value of the one lane that executes an instruction."""
    (active,) = np.nonzero(lanes(mask))
    if active.size != 1:
        raise NotOneThread(f"an instruction of one thread in {active.size}")
    return int(values[active[0]])


def common(values: Array, mask: Mask) -> int:
    """The value that all active lanes have."""
    active = values[lanes(mask)]
    if (active != active[0]).any():
        raise NotConverged(f"lanes disagree about an operand of the warp: {active.tolist()}")
    return int(active[0])


def whole(warp: "Warp", mask: Mask, what: str) -> None:
    """Refuses an instruction of all lanes in a part of them."""
    if mask is not True:
        raise NotConverged(f"{what} by a part of the warp: {warp}")
