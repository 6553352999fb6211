"""rms_norm on the GPU: real widths, odd widths, many rows."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.norm import cuda
from tests.ops.cases import EPS, assert_rounded_once
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison

pytestmark = pytest.mark.gpu

rms_norm = immediately(cuda.rms_norm)


@pytest.mark.parametrize(
    "width", [1, 7, 32, 64, 96, 128, 192, 512, 1024, 1536, 4096, 7168, 16_384, 24_000]
)
@pytest.mark.parametrize("rows", [1, 8, 700])
def test_equals_the_formula_rounded_once(rows: int, width: int) -> None:
    torch.manual_seed(width + rows)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda")
    poison(8 << 20)
    weighted = rms_norm(x, weight, EPS)
    plain = rms_norm(x, None, EPS)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS) ** -0.5
    assert_rounded_once(plain, exact)
    assert_rounded_once(weighted, exact * weight.double())


def test_misaligned_rows() -> None:
    flat, check = guarded(torch.randn(3 * 128 + 1, device="cuda").bfloat16())
    shifted = flat[1:].view(3, 128)
    assert torch.equal(rms_norm(shifted, None, EPS), rms_norm(shifted.clone(), None, EPS))
    check()


def test_replay_repeats_and_nothing_synchronises() -> None:
    x = torch.randn(4, 1536, device="cuda").bfloat16()
    weight = torch.randn(1536, device="cuda")

    def twice(recording: Recording, x: Tensor) -> Tensor:
        return cuda.rms_norm(recording, cuda.rms_norm(recording, x, weight, EPS), weight, EPS)

    prepared = PreparedOp(twice, x)
    assert torch.equal(prepared.run(), rms_norm(rms_norm(x, weight, EPS), weight, EPS))
    assert_no_synchronisation(prepared.run)
    assert_replay_is_eager(prepared.run)


def test_a_recording_serves_fewer_tokens() -> None:
    x = torch.randn(700, 512, device="cuda").bfloat16()
    prepared = PreparedOp(cuda.rms_norm, x, None, EPS)
    for tokens in (700, 9, 128):
        prepared.result.fill_(torch.nan)
        y = prepared.run(tokens)
        assert torch.equal(y[:tokens], rms_norm(x[:tokens], None, EPS))
        assert bool(y[tokens:].isnan().all())


def test_refuses_what_it_cannot_compute() -> None:
    x = torch.randn(2, 64, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"x: found torch\.float32, expected torch\.bfloat16"):
        rms_norm(x.float(), None, EPS)
    with pytest.raises(ValueError, match=r"weight: found torch\.float32 \[32\], expected .*\[64\]"):
        rms_norm(x, torch.ones(32, device="cuda"), EPS)
    with pytest.raises(ValueError, match="found a tensor on cpu, expected cuda"):
        rms_norm(x, torch.ones(64), EPS)
    with pytest.raises(ValueError, match=r"x: found strides \(64, 2\), expected rows without gaps"):
        rms_norm(x[:, ::2], None, EPS)
