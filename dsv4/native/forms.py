"""The native forms that there are, by the activations that they multiply, and their checks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.launch.target import compile_target
from dsv4.native.check import Check
from dsv4.native.emulation import emulation
from dsv4.native.form import NativeForm
from dsv4.native.operands import Product
from dsv4.native.prefill_checks import (
    PrefillChecks,
    alike_products,
    grouped_products,
    linear_products,
    mixtures,
)
from dsv4.native.quantiser_checks import quantiser_checks
from dsv4.ops.linear.cutedsl.gemm_config import ARCHITECTURES
from dsv4.ops.quantize_activations import ActivationFormat, activation_format
from dsv4.ops.tables import CUDA_TABLE, NATIVE_TABLES, RecordedTable
from dsv4.weights.quant import QuantFormat

_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_FP8 = QuantFormat.FP8_BLOCK128
_MXFP4 = QuantFormat.MXFP4
_NVFP4 = QuantFormat.NVFP4
_BF16 = QuantFormat.BF16
# Formats that kernels read: those of dense weights, of block-diagonal ones and of experts in
# published layouts. In every mode, for a weight that rounded activations do not multiply meets the
# kernels of 16-bit ones.
_FORMATS = (_NVFP4, _MXFP4, _FP8, _BF16)
_PUBLISHED = (_FORMATS, (_FP8, _BF16), (_NVFP4, _MXFP4))


def native_products(mode: ActivationMode) -> Iterator[Product]:
    """What the kernels of this table have to compute right."""
    kinds = (linear_products, grouped_products, mixtures)
    for products, formats in zip(kinds, _PUBLISHED, strict=True):
        for format in formats:
            yield from products(format)
    for format in _FORMATS:
        yield from alike_products(format)
    if mode == "fp8":
        for product in mixtures(_NVFP4):
            yield product._replace(disguised=True)


def prefill_checks(mode: ActivationMode) -> PrefillChecks:
    """The maker of their checks, those of rounded rows under another name."""
    return PrefillChecks("blackwell_w16", native_table(mode), CUDA_TABLE)


def bf16_checks() -> list[Check]:
    """Of products with 16-bit activations."""
    return _checks("bf16")


def fp8_checks() -> list[Check]:
    """Of FP8 activations and what multiplies them."""
    return [*quantiser_checks(ActivationFormat.FP8), *_checks("fp8")]


def nvfp4_checks() -> list[Check]:
    """Of NVFP4 activations and what multiplies them, and of FP8 ones beside them."""
    quantisers = [check for format in ActivationFormat for check in quantiser_checks(format)]
    return [*quantisers, *_checks("nvfp4")]


def native_table(mode: ActivationMode) -> RecordedTable:
    """The table with native kernels for these activations; results of rounded ones are compared
    with torch ops that round as they do.
    """
    table = NATIVE_TABLES[mode]
    return table if mode == "bf16" else replace(table, reference=emulation(CUDA_TABLE))


def runs_on_blackwell(device: torch.device) -> bool:
    """Whether a device has the tensor cores that these kernels are made for."""
    if device.type != "cuda":
        return False
    return compile_target(*torch.cuda.get_device_capability(device)) in ARCHITECTURES


def _checks(mode: ActivationMode) -> list[Check]:
    checks = prefill_checks(mode)
    rounded = replace(checks, kernel="blackwell_scaled")
    return [
        (rounded if _is_rounded(mode, product) else checks).check(product)
        for product in native_products(mode)
    ]


def _is_rounded(mode: ActivationMode, product: Product) -> bool:
    """Whether the weight of its format multiplies quantised rows."""
    return product.disguised or activation_format(mode, product.format) is not None


def _form(mode: ActivationMode) -> NativeForm:
    name = f"{__name__}:{mode}_checks"
    return NativeForm(native_table(mode), name, runs_on_blackwell, _PACKAGES)


NATIVE_FORMS: Mapping[ActivationMode, NativeForm] = {mode: _form(mode) for mode in ACTIVATION_MODES}
