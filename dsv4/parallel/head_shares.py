"""Which rows of the head the devices of a run multiply in its decode steps
(docs/decode.md#the-head-on-all-devices).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from dsv4.parallel.peer_memory import reach_each_other
from dsv4.weights.packed import TILE_ROWS, PackedWeight
from dsv4.weights.quant import Weight
from dsv4.weights.shared_rows import ROW_UNIT, RowShare, SharedWeight, on_device, rows_of

# What the last device reads of its rows while the hidden states go to the others and the logits
# come back from them (docs/log.md).
HEAD_START_BYTES = 8 << 20


def share_rows(rows: int, nbytes: int, devices: int) -> list[tuple[int, int]]:
    """First row and end of the share of every device, the last of which has what the others leave.
    ``nbytes``: of all rows. Empty where one device is as fast, or rows make no whole tiles.
    """
    if devices == 1 or rows % TILE_ROWS:
        return []
    share = rows * (nbytes - HEAD_START_BYTES) // (nbytes * devices) // ROW_UNIT * ROW_UNIT
    if share <= 0:
        return []
    return list(pairwise([*(device * share for device in range(devices)), rows]))


def share_head(lm_head: Weight, devices: Sequence[torch.device]) -> Weight:
    """The head with the shares of ``devices``, the last of which has all of it: of the others they
    are in memory of their own. The head itself where its rows are not shared.
    """
    if not isinstance(lm_head, PackedWeight):
        return lm_head
    found = share_rows(lm_head.shape[0], lm_head.nbytes, len(devices))
    is_planned = lm_head.data.is_meta
    if not found or not (is_planned or reach_each_other(devices)):
        return lm_head
    shares = (
        RowShare(device, first, on_device(rows_of(lm_head, first, stop), device))
        for device, (first, stop) in zip(devices, found, strict=True)
    )
    return SharedWeight.of(lm_head, tuple(shares))
