"""Where the torch op of attention rounds, and that it is exact for large logits. Kernels may round
inside (docs/numerics.md#on-a-gpu).
"""

import pytest
import torch

from dsv4.ops import TORCH
from tests.ops.attention.test_attention import exact_attention, random_keys
from tests.ops.cases import HEAD_DIM, assert_near, exact_rope, inv_freq, normal, positions
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


def test_large_logits_do_not_overflow() -> None:
    keys = random_keys(0)
    q_THD = normal(1, 2, HEAD_DIM, seed=16, scale=1e4)
    out = TORCH.sparse_attention(
        q_THD, keys, None, torch.tensor([-50.0, 50.0]), positions(150), inv_freq(0)
    )
    exact = exact_attention(q_THD[0], keys, None, torch.tensor([-50.0, 50.0]), 150, inv_freq(0))
    assert_near(out[0], exact, 4e-6)  # found: 1.3e-6, on some CPUs less
