"""Prefill GEMM on the GPU: float32 accumulation of the packed weight for any T, N, K; both
instruction sets.
"""

import pytest
import torch
from torch import Tensor

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import prefill
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.norm.cuda import rms_norm
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.instruction_sets import INSTRUCTION_SETS, use_instructions

pytestmark = pytest.mark.gpu
FORMATS = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16]

linear = immediately(prefill.linear)
grouped_linear = immediately(prefill.grouped_linear)


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_instructions(request.param, monkeypatch, prefill)


def normal(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def assert_product(y: Tensor, exact: Tensor) -> None:
    """One rounding of the exact value; float32 sums may add 3e-6 of the largest; NaN fails."""
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    allowed = torch.finfo(y.dtype).eps / 2 * exact.abs() + 3e-6 * exact.abs().amax()
    bad = ~(error <= allowed)
    if bool(bad.any()):
        where = bad.nonzero()
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} wrong, "
            f"first {where[:4].tolist()} last {where[-1].tolist()}, "
            f"largest error {float(error.max()):.3g} of {float(exact.abs().max()):.3g}; "
            f"found {y[bad][:4].tolist()} expected {exact[bad][:4].tolist()}"
        )


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [
        (9, 64, 64),
        (128, 256, 128),
        (33, 32, 32),
        (130, 640, 192),
        (257, 1536, 1024),
        (1000, 512, 4096),
        (70, 2048, 7168),
    ],
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_linear(
    format: QuantFormat, tokens: int, rows: int, columns: int, out_dtype: torch.dtype
) -> None:
    weight = quantize(normal(rows, columns, seed=1, scale=0.1), format)
    x = normal(tokens, columns, seed=2, dtype=torch.bfloat16)
    packed = pack_weight(weight)
    poison(1 << 20)
    y = linear(x, packed, out_dtype)
    assert y.dtype == out_dtype
    assert_product(y, x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(9, 1, 1), (17, 7, 3), (40, 65, 33), (150, 129, 100), (12, 8, 16)],
)
def test_odd_sizes(tokens: int, rows: int, columns: int) -> None:
    weight = QuantTensor.dense(normal(rows, columns, seed=3, dtype=torch.bfloat16))
    x = normal(tokens, columns, seed=4, dtype=torch.bfloat16)
    poison(1 << 20)
    assert_product(linear(x, pack_weight(weight)), x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "columns"),
    [(20, 4, 32, 128), (300, 8, 1024, 4096), (33, 2, 4, 64), (64, 16, 1024, 512)],
)
def test_grouped_linear(
    format: QuantFormat, tokens: int, groups: int, rows: int, columns: int
) -> None:
    weight = quantize(normal(groups * rows, columns, seed=5, scale=0.1), format)
    x_GTK = normal(groups, tokens, columns, seed=6, dtype=torch.bfloat16)
    x_TGK = x_GTK.transpose(0, 1)
    packed = pack_weight(weight)
    poison(1 << 20)
    y = grouped_linear(x_TGK, packed)
    dense = weight.dequantize().double().unflatten(0, (groups, rows))
    assert_product(y, torch.einsum("gtk,grk->tgr", x_GTK.double(), dense))


def test_whole_numbers_are_exact() -> None:
    generator = torch.Generator("cuda").manual_seed(7)
    x, weight = (
        torch.randint(-8, 9, shape, generator=generator, device="cuda").bfloat16()
        for shape in ((100, 640), (320, 640))
    )
    y = linear(x, pack_weight(QuantTensor.dense(weight)), torch.float32)
    assert torch.equal(y.double(), x.double() @ weight.double().T)


def test_every_code_and_scale() -> None:
    """Identity activations read every weight back: all E2M1 codes times all E4M3 scales, exact to
    the global scale.
    """
    data = torch.arange(256, device="cuda", dtype=torch.uint8).repeat(128, 1)
    scales = torch.arange(128, device="cuda", dtype=torch.uint8)
    scales[127] = 0  # NaN
    block_scale = scales[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    weight = QuantTensor(
        data, block_scale, torch.tensor(0.5, device="cuda"), QuantFormat.NVFP4, (128, 512)
    )
    y = linear(
        torch.eye(512, device="cuda", dtype=torch.bfloat16), pack_weight(weight), torch.float32
    )
    assert torch.equal(y, weight.dequantize().T)


def test_every_fp8_code_with_float_scales() -> None:
    """Block scales that are no powers of two, and zero: every E4M3 code is read back."""
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    data = codes.repeat(256, 2).view(torch.float8_e4m3fn)
    block_scale = torch.tensor([[0.3, 1.7e-3, 2.0, 0.0], [1e-6, 0.0, 5.0, 0.01]], device="cuda")
    weight = QuantTensor(data, block_scale, None, QuantFormat.FP8_BLOCK128, (256, 512))
    y = linear(
        torch.eye(512, device="cuda", dtype=torch.bfloat16), pack_weight(weight), torch.float32
    )
    torch.testing.assert_close(y, weight.dequantize().T, rtol=1e-6, atol=0)


def test_strided_input_and_bad_rows_stay_apart() -> None:
    weight = pack_weight(quantize(normal(96, 64, seed=8), QuantFormat.NVFP4))
    wide = normal(40, 128, seed=9, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"^x: found strides \(128, 2\), expected rows without gaps"
    ):
        linear(wide[:, ::2], weight)
    clean = linear(wide[:, :64], weight)
    wide[3] = torch.nan
    found = linear(wide[:, :64], weight)
    assert bool(found[3].isnan().all())
    others = torch.arange(40, device="cuda") != 3
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("tokens", [16, 700])
def test_replay_and_repetition(tokens: int) -> None:
    """Graph replay gives the eager bits (split sums included), nothing synchronises."""
    weight = pack_weight(quantize(normal(1024, 4096, seed=10, scale=0.1), QuantFormat.FP8_BLOCK128))
    x = normal(tokens, 4096, seed=11, dtype=torch.bfloat16)
    prepared = PreparedOp(prefill.linear, x, weight)
    assert_replay_is_eager(prepared.run)
    assert_no_synchronisation(prepared.run)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_a_recording_serves_shorter_chunks(format: QuantFormat) -> None:
    """The bits of a recording for exactly these tokens, whatever ran before; rows behind them are
    left alone.
    """
    weight = pack_weight(quantize(normal(1024, 4096, seed=14, scale=0.1), format))
    x = normal(700, 4096, seed=15, dtype=torch.bfloat16)
    prepared = PreparedOp(prefill.linear, x, weight)
    for tokens in (700, 9, 129, 16, 512, 700):
        prepared.result.fill_(torch.nan)
        y = prepared.run(tokens)
        assert torch.equal(y[:tokens], linear(x[:tokens], weight))
        assert bool(y[tokens:].isnan().all())


def test_rows_with_a_norm() -> None:
    """The norm, then every product in a buffer of its own."""
    weights = [
        quantize(normal(rows, 512, seed=rows), QuantFormat.FP8_BLOCK128) for rows in (256, 40)
    ]
    rows = pack_rows(weights, [None, torch.float32])
    norm_weight = normal(512, seed=16).abs() + 0.5
    x = normal(50, 512, seed=17, dtype=torch.bfloat16)
    for norm in (None, norm_weight):
        inner = x if norm is None else immediately(rms_norm)(x, norm, 1e-6)
        products = immediately(prefill.linear_rows)(x, rows, norm, 1e-6)
        for product, weight, dtype in zip(products, rows.weights, rows.dtypes, strict=True):
            assert torch.equal(product, linear(inner, weight, dtype))


def test_errors_name_the_argument() -> None:
    weight = pack_weight(quantize(normal(64, 64, seed=12), QuantFormat.NVFP4))
    x = normal(16, 64, seed=13, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^x: found torch.float32"):
        linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"^x: found width 32, expected K = 64"):
        linear(x[:, :32], weight)
    with pytest.raises(ValueError, match="^out_dtype"):
        linear(x, weight, torch.float16)
