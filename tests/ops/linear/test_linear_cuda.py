"""The decode kernel on real and odd shapes, 1 to 8 tokens, against float64 products of the
dequantised weights.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import decode
from dsv4.ops.linear.bench import random_weight
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.norm import rms_norm
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
FORMATS = (NVFP4, MXFP4, FP8, BF16)
# Largest error of a float32 product, as a share of Σ|x·w| of its row: a few units of float32
# rounding, whatever K is.
FLOAT32_BOUND = 1e-6
EPS = 1e-6

linear = immediately(decode.linear)
grouped_linear = immediately(decode.grouped_linear)
linear_rows = immediately(decode.linear_rows)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def assert_product(found: Tensor, x: Tensor, weight: QuantTensor | Tensor) -> None:
    """float32 within ``FLOAT32_BOUND``; bfloat16 within that and one rounding."""
    values = (weight if isinstance(weight, Tensor) else weight.dequantize()).double()
    exact = x.double() @ values.T
    room = FLOAT32_BOUND * (x.double().abs() @ values.abs().T)
    if found.dtype == torch.bfloat16:
        room = room + 2.0**-8 * exact.abs()
    excess = (found.double() - exact).abs() / room.clamp(min=1e-300)
    worst = float(excess.max()) if bool(torch.isfinite(found).all()) else float("nan")
    assert found.shape == exact.shape
    place = divmod(int(excess.argmax()), exact.shape[1])
    assert worst <= 1, f"{worst:.3g} times the bound at {place} of {exact.shape}"


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (7168, 16384),
        (4096, 8192),
        (1536, 7168),
        (512, 4096),
        (8192, 1024),
        (7168, 3072),
        (64, 64),
        (8, 32),
        (200, 160),
    ],
    ids=str,
)
def test_linear(format: QuantFormat, rows: int, columns: int) -> None:
    weight = random_weight(rows, columns, format)
    packed = pack_weight(weight)
    for tokens in range(1, 9) if rows * columns < 1 << 24 else (1, 4, 7, 8):
        x = normal(tokens, columns)
        for dtype in (torch.float32, torch.bfloat16):
            poison(4 << 20)
            assert_product(linear(x, packed, dtype), x, weight)


@pytest.mark.parametrize("first", [1, 4, 8])
def test_rows_of_x_begin_anywhere(first: int) -> None:
    weight = random_weight(200, 160, FP8)
    packed = pack_weight(weight)
    for tokens in (1, 3):
        x = normal(tokens, 176)[:, first : first + 160]
        assert_product(linear(x, packed), x, weight)


def test_head() -> None:
    weight = random_weight(129280, 7168, BF16)
    packed = pack_weight(weight)
    for tokens in (1, 8):
        x = normal(tokens, 7168)
        y = linear(x, packed, torch.float32)
        for first in range(0, 129280, 16160):
            assert_product(
                y[:, first : first + 16160], x, weight.data[first : first + 16160].float()
            )


LISTS: list[tuple[int, list[tuple[int, QuantFormat, torch.dtype | None]]]] = [
    (
        7168,
        [
            (1536, FP8, None),
            (512, FP8, None),
            *[(n, BF16, torch.float32) for n in (1024, 1024, 256, 256, 64)],
        ],
    ),
    (
        4096,
        [
            (1024, NVFP4, None),
            (512, NVFP4, None),
            (512, BF16, torch.float32),
            (512, BF16, torch.float32),
        ],
    ),
    (1536, [(65536, FP8, None), (8192, FP8, None)]),
    (1024, [(32768, NVFP4, None), (8192, NVFP4, None)]),
    (
        128,
        [
            (64, MXFP4, None),
            (40, FP8, torch.float32),
            (24, BF16, None),
            (72, NVFP4, None),
            (8, FP8, None),
        ],
    ),
    (96, [(64, FP8, None), (200, FP8, torch.float32), (8, FP8, None)]),
    (64, [(7, BF16, None), (8, BF16, torch.float32)]),
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("columns", "matrices"), LISTS, ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_rows(
    columns: int, matrices: Sequence[tuple[int, QuantFormat, torch.dtype | None]], norm: bool
) -> None:
    weights = [random_weight(count, columns, format) for count, format, _ in matrices]
    rows = pack_rows(weights, [dtype for _, _, dtype in matrices])
    for weight, packed in zip(weights, rows.weights, strict=True):
        assert torch.equal(packed.dequantize(), weight.dequantize())
    norm_weight = torch.rand(columns, device="cuda") + 0.5 if norm else None
    for tokens in (1, 2, 4, 6, 8):
        x = normal(tokens, columns, scale=3.0)
        poison(4 << 20)
        products = linear_rows(x, rows, norm_weight, EPS)
        inner = x if norm_weight is None else rms_norm(x, norm_weight, EPS)
        for product, weight, (_, _, dtype) in zip(products, weights, matrices, strict=True):
            assert product.dtype == (dtype or torch.bfloat16)
            assert product.is_contiguous()
            if norm:
                # The sum of squares may differ in its last bit, and with it the rounding of single
                # inputs.
                exact = inner.double() @ weight.dequantize().double().T
                assert float((product.double() - exact).norm() / exact.norm()) < 4e-3
            else:
                assert_product(product, x, weight)
    assert_replay_is_eager(PreparedOp(decode.linear_rows, x, rows, norm_weight, EPS).run)


def test_norm_agrees_with_the_norm_alone() -> None:
    """Against the list without a norm on rms_norm's output: the same bits wherever the rounded
    inputs are the same.
    """
    rows = pack_rows([random_weight(2048, 1536, FP8)], [torch.float32])
    weight = torch.rand(1536, device="cuda") + 0.5
    x = normal(4, 1536)
    (fused,) = linear_rows(x, rows, weight, EPS)
    (apart,) = linear_rows(rms_norm(x, weight, EPS), rows)
    assert float((fused - apart).norm() / apart.norm()) < 1e-3


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("groups", "rows", "columns"),
    [(16, 1024, 4096), (8, 1024, 4096), (4, 32, 128), (2, 20, 96), (8, 4, 64)],
    ids=str,
)
def test_grouped(format: QuantFormat, groups: int, rows: int, columns: int) -> None:
    weight = random_weight(groups * rows, columns, format)
    packed = pack_weight(weight)
    values = weight.dequantize()
    for tokens in (1, 3, 8):
        x_TGK = normal(tokens, groups, columns)
        poison(4 << 20)
        y_TGR = grouped_linear(x_TGK, packed)
        for group in range(groups):
            assert_product(
                y_TGR[:, group], x_TGK[:, group], values[group * rows : (group + 1) * rows]
            )
    strided = x_TGK.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(grouped_linear(strided, packed), grouped_linear(x_TGK, packed))
    assert_replay_is_eager(PreparedOp(decode.grouped_linear, x_TGK, packed).run)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_activations_of_any_size(format: QuantFormat) -> None:
    """Each token has its own power of two: tiny, huge, zero and mixed rows are as exact as ordinary
    ones.
    """
    weight = random_weight(256, 512, format)
    packed = pack_weight(weight)
    x = normal(8, 512)
    x[0] *= 2.0**-60
    x[1] *= 2.0**40
    x[2] = 0
    x[3, 1:] *= 2.0**-12
    x[4, ::2] *= 2.0**-20
    assert_product(linear(x, packed, torch.float32), x, weight)
    alone = torch.cat([linear(x[t : t + 1], packed, torch.float32) for t in range(8)])
    for tokens in range(1, 9):
        assert torch.equal(linear(x[:tokens], packed, torch.float32), alone[:tokens])


@pytest.mark.parametrize("tokens", range(3, 9))
def test_tokens_do_not_touch_each_other(tokens: int) -> None:
    packed = pack_weight(random_weight(128, 256, NVFP4))
    x = normal(tokens, 256)
    expected = linear(x, packed)
    x[0, 3] = float("nan")
    x[-1, 5] = float("inf")
    y = linear(x, packed)
    assert torch.equal(y[1:-1], expected[1:-1])
    assert bool(y[0].isnan().all())
    assert not bool(y[-1].isfinite().any())


def test_stacked_strided_and_chained() -> None:
    """A member of a stack, rows of a wider x, and a product that is the next product's x, in a
    graph.
    """
    weight = random_weight(3 * 64, 256, FP8)
    stack = QuantTensor.dense(weight.dequantize().bfloat16().view(3, 64, 256))
    packed = pack_weight(stack)
    wide = normal(5, 512)
    assert_product(linear(wide[:, 256:], packed[1]), wide[:, 256:], stack[1])
    with pytest.raises(
        ValueError, match=r"^x: found strides \(512, 2\), expected rows without gaps"
    ):
        linear(wide[:, ::2], packed[2])
    chain = [pack_weight(random_weight(2048, 2048, format)) for format in FORMATS * 3]

    def chained(recording: Recording, x: Tensor) -> Tensor:
        y = x
        for link in chain:
            scaled = recording.empty_like(y)
            recording.call(lambda _, y, scaled: torch.mul(y, 0.02, out=scaled), y, scaled)
            y = decode.linear(recording, scaled, link)
        return y

    step = PreparedOp(chained, normal(1, 2048)).run
    assert_replay_is_eager(step)
    assert_no_synchronisation(step)


def test_wrong_arguments() -> None:
    packed = pack_weight(random_weight(64, 128, FP8))
    with pytest.raises(ValueError, match=r"^x: found torch\.float32, expected torch\.bfloat16"):
        linear(torch.zeros(1, 128, device="cuda"), packed)
    with pytest.raises(ValueError, match="^x: found width 64, expected K = 128"):
        linear(normal(1, 64), packed)
    with pytest.raises(ValueError, match="^out_dtype: found"):
        linear(normal(1, 128), packed, torch.float16)
    with pytest.raises(ValueError, match="^norm_weight: found"):
        linear_rows(
            normal(1, 128),
            pack_rows([random_weight(8, 128, FP8)], [None]),
            torch.ones(64, device="cuda"),
            EPS,
        )
