"""Whether caches hold what the torch ops would leave there."""

import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, history_tokens
from dsv4.caches.rows import RowCache
from tests.ops.prepare_attention.cases import JUNK


def rows_agree(found: RowCache, expected: RowCache) -> bool:
    """Rows that the torch op wrote hold nearly its values, all others their junk."""
    one, two = (cache.data.view(torch.uint8) for cache in (found, expected))
    written = (two != JUNK).any(1)
    slots = written.nonzero().flatten()
    values, right = (cache.read(slots) for cache in (found, expected))
    error = (values - right).abs() - 0.14 * right.abs() - 2**-6 * right.abs().amax(1, keepdim=True)
    left = bool((one[~written] == JUNK).all())
    different = (one[written] != two[written]).sum()
    return left and bool((error <= 0).all()) and int(different) <= 0.04 * one[written].numel()


def states_agree(found: CompressedState, expected: CompressedState) -> bool:
    """Rings to the bit, rows nearly."""
    kv, score = (
        same_bytes(getattr(found.ring, part), getattr(expected.ring, part))
        for part in ("kv", "score")
    )
    return kv and score and rows_agree(found.rows, expected.rows)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Also where both are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def poison_unseen(state: CompressedState, ratio: int, start: int) -> None:
    """NaN in those slots of the ring that no window from a position on needs."""
    slots = state.ring.kv.shape[0]
    unseen = torch.ones(slots, dtype=torch.bool)
    unseen[torch.arange(max(0, start - history_tokens(ratio)), start) % slots] = False
    state.ring.kv[unseen] = torch.nan
    state.ring.score[unseen] = torch.nan
