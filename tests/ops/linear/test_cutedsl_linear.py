"""The CuTe DSL GEMM against float32 products of the dequantised weights, over formats, tiles and ragged sizes."""

import pytest
import torch
from torch import Tensor

from dsv4.launch import loader
from dsv4.ops.linear.prefill_cutedsl import (
    INSTALLED,
    cutedsl_linear_batches,
    cutedsl_prefill_linear,
    cutedsl_supports,
)
from dsv4.quant import QuantFormat, QuantTensor, quantize
from dsv4.weights.packed import PackedWeight, pack_weight
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")]

FORMATS = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16]
# One bf16 rounding of the result (at most 2^-9 each, 2^-9.6 in the mean square), or float32 accumulation alone.
BOUNDS = {torch.bfloat16: 2.5e-3, torch.float32: 1e-5}


def random_weight(format: QuantFormat, rows: int, columns: int) -> PackedWeight:
    """Rows and column blocks of very different size, so that a scale applied in the wrong place shows."""
    weight = torch.randn(rows, columns, device="cuda")
    weight *= torch.logspace(-2, 1, columns, device="cuda")[torch.randperm(columns, device="cuda")]
    weight *= torch.linspace(0.1, 2.0, rows, device="cuda")[:, None]
    return pack_weight(quantize(weight, format))


def exact(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.double() @ weight.dequantize().double().T


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = relative_error(found, expected)
    assert error < BOUNDS[found.dtype], f"relative error {error:.2e}, expected below {BOUNDS[found.dtype]:.1e}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(9, 64, 64), (64, 192, 448), (300, 1024, 1536)])
def test_sizes(format: QuantFormat, tokens: int, rows: int, columns: int) -> None:
    out_dtype = torch.float32 if tokens == 64 else torch.bfloat16
    weight = random_weight(format, rows, columns)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    assert cutedsl_supports(x.unsqueeze(1), weight)
    poison()
    found = cutedsl_prefill_linear(x, weight, out_dtype)
    assert found.dtype == out_dtype
    assert_close(found, exact(x, weight))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "tile", [(16, 1, 1, 1), (32, 2, 1, 1), (64, 1, 2, 2), (256, 2, 1, 1), (256, 2, 1, 2), (128, 2, 2, 1)]
)
def test_every_tile(format: QuantFormat, tile: tuple[int, int, int, int]) -> None:
    """Few blocks, so that each computes several work tiles, ragged in both directions."""
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.hopper_gemm import GemmConfig

    gemm = jit.load(GemmConfig(format, jit.DTYPES[torch.bfloat16], *tile, 6))
    weight = random_weight(format, 1600, 576)
    x = torch.randn(700, 576, device="cuda").bfloat16()
    y, check = guarded(torch.full((700, 1600), torch.nan, dtype=torch.bfloat16, device="cuda"))
    parts = [weight.data if part is None else part for part in (weight.block_scale, weight.global_scale)]
    parts[1] = parts[1].view(1) if format is QuantFormat.NVFP4 else parts[1]
    gemm(x.unsqueeze(1), weight.data, *parts, y)
    check()
    assert_close(y, exact(x, weight))


def test_fp8_scales_of_any_value() -> None:
    """float32 block scales that are no powers of two, a zero one, and x with a stride."""
    weight = quantize(torch.randn(256, 1024, device="cuda"), QuantFormat.FP8_BLOCK128)
    scale = torch.rand(2, 8, device="cuda") + 0.1
    scale[1, 3] = 0
    data = weight.data.clone()
    data[128:, 384:512] = 0
    packed = pack_weight(QuantTensor(data, scale, None, weight.format, weight.shape))
    x = torch.randn(100, 2048, device="cuda").bfloat16()[:, :1024]
    assert_close(cutedsl_prefill_linear(x, packed, torch.float32), exact(x, packed))


@pytest.mark.parametrize("format", FORMATS)
def test_groups(format: QuantFormat) -> None:
    weight = random_weight(format, 4 * 384, 512)
    x = torch.randn(300, 4, 512, device="cuda").bfloat16()
    found = cutedsl_linear_batches(x, weight, torch.bfloat16)
    expected = torch.stack([x[:, g].double() @ weight.dequantize().double()[384 * g :][:384].T for g in range(4)], 1)
    assert_close(found, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_graph_replay_and_reproducibility(format: QuantFormat) -> None:
    weight = random_weight(format, 512, 512)
    x = torch.randn(200, 512, device="cuda").bfloat16()
    first = cutedsl_prefill_linear(x, weight)
    assert torch.equal(first, cutedsl_prefill_linear(x, weight))
    assert_replay_is_eager(lambda: cutedsl_prefill_linear(x, weight))
    assert_no_synchronisation(lambda: cutedsl_prefill_linear(x, weight))


def test_waits_for_the_kernel_before_it() -> None:
    """A long chain in which every product reads what the last one wrote, launched without pause."""
    weight = pack_weight(QuantTensor.dense(torch.eye(1024, device="cuda").bfloat16()))
    x = torch.randn(3000, 1024, device="cuda").bfloat16()
    y = x
    for _ in range(50):
        y = cutedsl_prefill_linear(y, weight)
    assert torch.equal(x, y)


def test_refuses_what_it_cannot_do() -> None:
    weight = random_weight(QuantFormat.BF16, 128, 128)
    x = torch.randn(16, 128, device="cuda").bfloat16()
    for wrong in (x.float(), x[:8], x[:, :64]):
        with pytest.raises(ValueError, match="x: found"):
            cutedsl_prefill_linear(wrong, weight)
    with pytest.raises(ValueError, match="out_dtype"):
        cutedsl_prefill_linear(x, weight, torch.float16)
    assert not cutedsl_supports(x[:8].unsqueeze(1), weight)
    assert loader.architecture_of(0) == "sm_90a"
