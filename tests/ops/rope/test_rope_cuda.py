"""query_rope on the GPU: real shapes, any width, long contexts, graphs, bad input."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.rope import query_rope as torch_query_rope
from tests.ops import forms
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison

pytestmark = pytest.mark.gpu
EPS = 1e-6
query_rope = immediately(forms.query_rope)


def inv_freq(rope_width: int) -> Tensor:
    return 160000.0 ** (-torch.arange(0, rope_width, 2, device="cuda") / rope_width)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()


@pytest.mark.parametrize(
    ("heads", "width", "rope_width"),
    [
        (128, 512, 64),
        (64, 512, 64),
        (4, 512, 64),
        (3, 64, 16),
        (5, 20, 6),
        (2, 96, 32),
        (1, 2048, 64),
        (3, 64, 64),
        (2, 256, 160),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 300])
@pytest.mark.parametrize("start", [0, 127, 1_000_000])
def test_equals_the_torch_op(
    heads: int, width: int, rope_width: int, tokens: int, start: int
) -> None:
    """Equal but for roundings between two neighbours of bf16 that the order of the sum of squares
    decides.
    """
    q_THD = normal(tokens, heads, width, seed=1)
    position_T = start + torch.arange(tokens, device="cuda")
    poison(16 << 20)
    found = query_rope(q_THD, position_T, inv_freq(rope_width), EPS).float()
    expected = torch_query_rope(q_THD, position_T, inv_freq(rope_width), EPS).float()
    difference = (found - expected).abs()
    allowed = 2**-7 * expected.abs()
    # A rotated pair mixes two rounded values, each of which may have gone to the other neighbour.
    allowed[..., width - rope_width :] += 2**-5
    assert bool((difference <= allowed).all()), float(difference.max())
    assert int((difference > 0).sum()) <= max(2, 2e-3 * difference.numel())


def test_angles_of_long_contexts_are_exact() -> None:
    """Against float64 sines of the float32 angle, where fast intrinsics lose every digit."""
    position_T = torch.tensor([999_983, 131_071, 123_456_789]).cuda()
    frequencies = inv_freq(64)
    q_THD = torch.zeros(3, 1, 64, device="cuda", dtype=torch.bfloat16)
    q_THD[..., ::2] = 1.0
    out = query_rope(q_THD, position_T, frequencies, 0.0).double().unflatten(-1, (-1, 2))[:, 0]
    angle = (position_T.float()[:, None] * frequencies).double()
    size = float(torch.tensor(2.0).sqrt().bfloat16())
    assert float((out[..., 0] - size * angle.cos()).abs().max()) <= size * 2**-8
    assert float((out[..., 1] - size * angle.sin()).abs().max()) <= size * 2**-8


@pytest.mark.parametrize("tokens", [1, 40])
def test_graph_replay_and_no_synchronisation(tokens: int) -> None:
    q_THD, check_q = guarded(normal(tokens, 128, 512, seed=1))
    position_T = 5000 + torch.arange(tokens, device="cuda")
    frequencies = inv_freq(64)
    op = PreparedOp(forms.query_rope, q_THD, position_T, frequencies, EPS)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)
    check_q()


def test_unaligned_and_bad_input() -> None:
    wide = normal(3, 4, 1024, seed=1)
    position_T = torch.arange(3, device="cuda")
    frequencies = inv_freq(64)
    expected = query_rope(wide[..., :512].contiguous(), position_T, frequencies, EPS)
    shifted = torch.empty(3 * 4 * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(3, 4, 512)
    shifted.copy_(wide[..., :512])
    difference = (
        query_rope(shifted, position_T, frequencies, EPS).float() - expected.float()
    ).abs()
    assert float(difference.max()) <= 2**-6
    with pytest.raises(ValueError, match="q_THD: found strides"):
        query_rope(wide[..., :512], position_T, frequencies, EPS)
    with pytest.raises(ValueError, match="q_THD: found"):
        query_rope(wide.float(), position_T, frequencies, EPS)
    with pytest.raises(ValueError, match="positions_T: found"):
        query_rope(wide, position_T.int(), frequencies, EPS)
    with pytest.raises(ValueError, match="inv_freq: found"):
        query_rope(wide, position_T, frequencies.double(), EPS)
