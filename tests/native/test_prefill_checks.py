"""The checks of prefill products, on torch ops in the place of kernels, and on Hopper's."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.native.operands import Product
from dsv4.native.prefill_checks import (
    PrefillChecks,
    grouped_products,
    linear_products,
    mixtures,
)
from dsv4.native.random_weights import RandomWeights
from dsv4.ops import TORCH, TORCH_PACKING
from dsv4.ops.linear import grouped_linear
from dsv4.ops.moe import moe
from dsv4.ops.tables import TORCH_TABLE, DirectTable
from dsv4.weights.native import is_disguised_mxfp4
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.native.fakes import failing_linear, wrong_linear

CPU = torch.device("cpu")
FORMATS = [QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16]


def against_torch(**ops: Any) -> PrefillChecks:
    return PrefillChecks("fake", DirectTable(TORCH_PACKING, replace(TORCH, **ops)), TORCH_TABLE)


def small(format: QuantFormat) -> list[Product]:
    """Products of every op that take a moment on a CPU."""
    return [
        *(product for product in linear_products(format) if max(product.sizes) <= 1024),
        Product("grouped_linear", format, 20, (2, 32, 64)),
        next(mixtures(format)),
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_pack_and_are_no_nan(format: QuantFormat) -> None:
    random = RandomWeights(CPU)
    weight = random.weight(format, 3, 128, 256)
    values = pack_weight(weight).dequantize()
    assert torch.equal(values, weight.dequantize())
    assert bool(values.isfinite().all())
    assert 1e-3 < float(values.std()) < 10
    assert not torch.equal(random.weight(format, 3, 128, 256).dequantize(), values)
    assert torch.equal(RandomWeights(CPU).weight(format, 3, 128, 256).dequantize(), values)


def test_disguised_weights_are_in_disguise() -> None:
    nvfp4 = QuantFormat.NVFP4
    assert is_disguised_mxfp4(RandomWeights(CPU).weight(nvfp4, 64, 128, disguised=True))
    assert not is_disguised_mxfp4(RandomWeights(CPU).weight(nvfp4, 64, 128))


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_ops_pass_every_check(format: QuantFormat) -> None:
    products = small(format)
    assert [product.op for product in products] == [*["linear"] * 3, "grouped_linear", "moe"]
    checks = [against_torch().check(product) for product in products]
    assert [check.name for check in checks if check.run(CPU) is not None] == []


def test_every_product_has_a_name_of_its_own() -> None:
    made = [
        product
        for format in FORMATS
        for kind in (linear_products, grouped_products, mixtures)
        for product in kind(format)
    ]
    assert len({product.name for product in made}) == len(made)
    assert made[0].name == "linear nvfp4 192x384 T=130"
    assert made[0].flops == 2 * 130 * 192 * 384
    assert made[0].values == 130 * (192 + 384)
    assert Product("grouped_linear", QuantFormat.BF16, 9, (2, 32, 64)).values == 9 * 2 * (32 + 64)


@pytest.mark.parametrize(
    ("ops", "op", "reason"),
    [
        ({"linear": wrong_linear}, "linear", "130 of 24960 values are wrong, at (0, 191)"),
        ({"grouped_linear": lambda x, w: grouped_linear(x, w) * 1.05}, "grouped_linear", "wrong"),
        ({"moe": lambda *a: moe(*a)._replace(y_TE=moe(*a).y_TE.roll(1, 0))}, "moe", "are wrong"),
    ],
)
def test_wrong_results_do_not_pass(ops: dict[str, Any], op: str, reason: str) -> None:
    product = next(product for product in small(QuantFormat.BF16) if product.op == op)
    told = against_torch(**ops).check(product).run(CPU)
    assert told is not None
    assert reason in told


def test_an_error_of_the_device_is_raised() -> None:
    first, *_ = small(QuantFormat.BF16)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        against_torch(linear=failing_linear).check(first).run(CPU)
