"""Where the torch op of attention rounds. Kernels may round inside (docs/numerics.md#on-a-gpu)."""

import pytest
import torch

from dsv4.ops import TORCH
from tests.ops.attention.test_attention import exact_attention, random_keys
from tests.ops.cases import HEAD_DIM, exact_rope, inv_freq, normal
from tests.ops.rounding import assert_rounded_twice

NO_ROTATION = torch.zeros(32)


@pytest.mark.parametrize("ratio", [0, 128])
@pytest.mark.parametrize("start", [0, 126, 300, 5100])
def test_the_result_is_rounded_before_and_behind_its_rotation_and_nowhere_else(
    ratio: int, start: int
) -> None:
    """Attention weights stay float32: rounded ones move 28 of 30 results further than this."""
    keys = random_keys(ratio)
    q_THD = normal(3, 2, HEAD_DIM, seed=3, dtype=torch.bfloat16)
    sink_H = normal(2, seed=4)
    frequencies = inv_freq(ratio)
    out_THD = TORCH.sparse_attention(
        q_THD, keys, None, sink_H, start + torch.arange(3), frequencies
    )
    for t, out_HD in enumerate(out_THD):
        position = start + t
        inner = exact_attention(q_THD[t], keys, None, sink_H, position, NO_ROTATION)
        assert_rounded_twice(
            out_HD, inner, lambda o_HD, p=position: exact_rope(o_HD, p, frequencies, inverse=True)
        )
