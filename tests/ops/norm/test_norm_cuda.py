"""rms_norm on the GPU: real widths, odd widths, many rows."""

import pytest
import torch

from dsv4.ops.norm.cuda import rms_norm
from tests.ops.cases import EPS, assert_rounded_once
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [1, 7, 32, 64, 96, 128, 192, 512, 1024, 1536, 4096, 7168, 16_384, 24_000])
@pytest.mark.parametrize("rows", [1, 8, 700])
def test_equals_the_formula_rounded_once(rows: int, width: int) -> None:
    torch.manual_seed(width + rows)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda")
    poison(8 << 20)
    weighted, plain = rms_norm(x, weight, EPS), rms_norm(x, None, EPS)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS) ** -0.5
    assert_rounded_once(plain, exact)
    assert_rounded_once(weighted, exact * weight.double())


def test_strided_and_misaligned_rows() -> None:
    wide = torch.randn(5, 256, device="cuda").bfloat16()
    assert torch.equal(rms_norm(wide[:, ::2], None, EPS), rms_norm(wide[:, ::2].contiguous(), None, EPS))
    flat, check = guarded(torch.randn(3 * 128 + 1, device="cuda").bfloat16())
    shifted = flat[1:].view(3, 128)
    assert torch.equal(rms_norm(shifted, None, EPS), rms_norm(shifted.clone(), None, EPS))
    check()


def test_replay_repeats_and_nothing_synchronises() -> None:
    x, weight = torch.randn(4, 1536, device="cuda").bfloat16(), torch.randn(1536, device="cuda")
    rms_norm(x, weight, EPS)
    assert_no_synchronisation(lambda: rms_norm(x, weight, EPS))
    assert_replay_is_eager(lambda: rms_norm(rms_norm(x, weight, EPS), weight, EPS))


def test_refuses_what_it_cannot_compute() -> None:
    x = torch.randn(2, 64, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"x: found torch\.float32, expected torch\.bfloat16"):
        rms_norm(x.float(), None, EPS)
    with pytest.raises(ValueError, match=r"weight: found \[32\]"):
        rms_norm(x, torch.ones(32, device="cuda"), EPS)
    with pytest.raises(ValueError, match="weight: found .* on cpu"):
        rms_norm(x, torch.ones(64), EPS)
