"""Attention inside a draft block: every token sees the window before the block and all of the
block.
"""

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops.attention.block import block_attention
from dsv4.ops.rope import rope
from tests.ops.cases import normal

WINDOW, SLOTS, BLOCK, WIDTH = 8, 20, 3, 16
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)


def filled(start: int) -> tuple[RowCache, Tensor]:
    """A ring with NaN wherever no token before the end of the block lies, and its rows."""
    cpu = torch.device("cpu")
    ring = RowCache.allocate(SLOTS, WIDTH, 8, RowFormat.PLAIN, torch.float32, cpu)
    ring.data.fill_(torch.nan)
    rows = normal(start + BLOCK, WIDTH, seed=start)
    kept = torch.arange(max(0, start - WINDOW), start + BLOCK)
    ring.write(kept % SLOTS, rows[kept])
    return ring, rows[kept]


@pytest.mark.parametrize("start", [1, 2, 7, 8, 9, 19, 20, 33])
def test_equals_the_formula_over_window_and_block(start: int) -> None:
    ring, keys = filled(start)
    q_THD = normal(BLOCK, 2, WIDTH, seed=100 + start)
    sink_H = normal(2, seed=3)
    positions_T = torch.arange(start, start + BLOCK)
    set_ = KeySet(ring, None, 0, WINDOW)
    found = block_attention(q_THD, set_, sink_H, positions_T, INV_FREQ)
    heads = []
    for token in range(BLOCK):
        scores = q_THD[token].double() @ keys.double().T / WIDTH**0.5
        weights = torch.cat((scores, sink_H.double()[:, None]), 1).softmax(1)[:, :-1]
        heads.append(weights @ keys.double())
    expected = rope(torch.stack(heads).float(), positions_T, INV_FREQ, inverse=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_is_rounded_once_in_16_bit() -> None:
    ring, _ = filled(9)
    q_THD = normal(BLOCK, 2, WIDTH, seed=5, dtype=torch.bfloat16)
    arguments = (KeySet(ring, None, 0, WINDOW), normal(2, seed=3), torch.arange(9, 12), INV_FREQ)
    found = block_attention(q_THD, *arguments)
    exact = block_attention(q_THD.float(), *arguments)
    assert found.dtype == torch.bfloat16
    # The result before the rotation is rounded too, as in ``sparse_attention``.
    torch.testing.assert_close(
        found.float(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max())
    )
