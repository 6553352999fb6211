"""The CuTe DSL GEMM against float32 products of the dequantised weights, over formats, tiles and
ragged sizes.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import prefill, prefill_cutedsl
from dsv4.ops.linear.prefill_cutedsl import cutedsl_supports, gemm_operands
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import (
    assert_no_synchronisation,
    assert_replay_is_eager,
    guarded,
    poison,
    relative_error,
)

pytestmark = pytest.mark.gpu

FORMATS = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16]
# One bf16 rounding of the result (at most 2^-9 each, 2^-9.6 in the mean square), or float32
# accumulation alone.
BOUNDS = {torch.bfloat16: 2.5e-3, torch.float32: 1e-5}

linear = immediately(prefill_cutedsl.linear)


def random_weight(format: QuantFormat, rows: int, columns: int) -> PackedWeight:
    """Rows and column blocks of very different size, so that a scale applied in the wrong place
    shows.
    """
    weight = torch.randn(rows, columns, device="cuda")
    weight *= torch.logspace(-2, 1, columns, device="cuda")[torch.randperm(columns, device="cuda")]
    weight *= torch.linspace(0.1, 2.0, rows, device="cuda")[:, None]
    return pack_weight(quantize(weight, format))


def product(x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[T, N]`` by the kernel itself, for fewer tokens than the launcher takes it for as well."""
    from dsv4.ops.linear.cutedsl import jit

    tokens, groups, _ = x_TGK.shape
    features = weight.shape[0]
    multiprocessors = Target.of(x_TGK.device).multiprocessors
    gemm = jit.gemm_for(weight.format, out_dtype, tokens, features, groups, multiprocessors)
    y = torch.empty((tokens, features), dtype=out_dtype, device="cuda")
    gemm(x_TGK, *gemm_operands(weight), y)
    return y


def exact(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.double() @ weight.dequantize().double().T


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = relative_error(found, expected)
    assert error < BOUNDS[found.dtype], (
        f"relative error {error:.2e}, expected below {BOUNDS[found.dtype]:.1e}"
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(9, 64, 64), (64, 192, 448), (300, 1024, 1536)]
)
def test_sizes(format: QuantFormat, tokens: int, rows: int, columns: int) -> None:
    out_dtype = torch.float32 if tokens == 64 else torch.bfloat16
    weight = random_weight(format, rows, columns)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    poison()
    found = product(x.unsqueeze(1), weight, out_dtype)
    assert_close(found, exact(x, weight))
    if tokens >= 128:
        recorded = linear(x, weight, out_dtype)
        assert recorded.dtype == out_dtype
        assert torch.equal(recorded, found)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "tile", [(16, 1, 1), (32, 2, 1), (64, 1, 2), (256, 2, 1), (256, 2, 2), (128, 2, 1)]
)
def test_every_tile(format: QuantFormat, tile: tuple[int, int, int]) -> None:
    """Few blocks, so that each computes several work tiles, ragged in both directions."""
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.hopper_gemm import GemmConfig, HopperGemm

    config = GemmConfig(format, jit.DTYPES[torch.bfloat16], *tile, 6)
    gemm = jit.load(HopperGemm, config, "sm_90a")
    weight = random_weight(format, 1600, 576)
    x = torch.randn(700, 576, device="cuda").bfloat16()
    y, check = guarded(torch.full((700, 1600), torch.nan, dtype=torch.bfloat16, device="cuda"))
    gemm(x.unsqueeze(1), *gemm_operands(weight), y)
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
    assert_close(product(x.unsqueeze(1), packed, torch.float32), exact(x, packed))


@pytest.mark.parametrize("format", FORMATS)
def test_groups(format: QuantFormat) -> None:
    weight = random_weight(format, 4 * 384, 512)
    x = torch.randn(300, 4, 512, device="cuda").bfloat16()
    found = immediately(prefill_cutedsl.grouped_linear)(x, weight)
    expected = torch.stack(
        [x[:, g].double() @ weight.dequantize().double()[384 * g :][:384].T for g in range(4)], 1
    )
    assert_close(found, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_graph_replay_and_reproducibility(format: QuantFormat) -> None:
    weight = random_weight(format, 512, 512)
    x = torch.randn(200, 512, device="cuda").bfloat16()
    prepared = PreparedOp(prefill_cutedsl.linear, x, weight)
    assert torch.equal(prepared.run(), linear(x, weight))
    assert_replay_is_eager(prepared.run)
    assert_no_synchronisation(prepared.run)


def test_a_recording_serves_shorter_chunks() -> None:
    """Below 128 tokens with the bits of the other form, from there on with those of a recording for
    just these.
    """
    weight = random_weight(QuantFormat.NVFP4, 512, 512)
    x = torch.randn(500, 512, device="cuda").bfloat16()
    prepared = PreparedOp(prefill_cutedsl.linear, x, weight)
    for tokens in (500, 9, 127, 128, 129, 300):
        prepared.result.fill_(torch.nan)
        y = prepared.run(tokens)
        form = linear if tokens >= 128 else immediately(prefill.linear)
        assert torch.equal(y[:tokens], form(x[:tokens], weight))
        assert bool(y[tokens:].isnan().all())


def test_waits_for_the_kernel_before_it() -> None:
    """A long chain in which every product reads what the last one wrote, launched without pause."""
    weight = pack_weight(QuantTensor.dense(torch.eye(1024, device="cuda").bfloat16()))
    x = torch.randn(3000, 1024, device="cuda").bfloat16()

    def chained(recording: Recording, x: Tensor) -> Tensor:
        y = x
        for _ in range(50):
            y = prefill_cutedsl.linear(recording, y, weight)
        return y

    assert torch.equal(x, immediately(chained)(x))


def test_refuses_what_it_cannot_do() -> None:
    weight = random_weight(QuantFormat.BF16, 128, 128)
    x = torch.randn(16, 128, device="cuda").bfloat16()
    for wrong in (x.float(), x[:, :64]):
        with pytest.raises(ValueError, match="x: found"):
            linear(wrong, weight)
    with pytest.raises(ValueError, match="out_dtype"):
        linear(x, weight, torch.float16)
    target = Target.of(x.device)
    assert target.architecture == "sm_90a"
    assert not cutedsl_supports(Recording(target, 8), x[:8].unsqueeze(1), weight)
