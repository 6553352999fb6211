"""The native forms, recorded for GPUs that are not here: their checks are about native kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.launch.target import Target
from dsv4.native import operands
from dsv4.native.child import checks_of
from dsv4.native.forms import (
    NATIVE_FORMS,
    native_products,
    native_table,
    prefill_checks,
    runs_on_blackwell,
)
from dsv4.native.operands import Product
from dsv4.native.prefill_checks import _recorded
from dsv4.ops.linear import prefill_scaled, prefill_w16
from dsv4.ops.linear.cutedsl.gemm_config import ARCHITECTURES, W16Config
from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.weights.quant import QuantFormat, planned_quant_tensor

META = torch.device("meta")


class PlannedWeights:
    """``RandomWeights`` without values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rows(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def weight(self, format: QuantFormat, *shape: int, disguised: bool = False) -> Any:
        return planned_quant_tensor(format, shape)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_every_check_is_one_of_a_native_kernel(
    monkeypatch: pytest.MonkeyPatch, mode: ActivationMode, architecture: str
) -> None:
    target = Target(META, architecture, 148)
    monkeypatch.setattr(Target, "of", lambda device: target)
    monkeypatch.setattr(operands, "RandomWeights", PlannedWeights)
    monkeypatch.setattr(prefill_w16, "load_gemm", lambda config, architecture: None)
    monkeypatch.setattr(prefill_scaled, "load_gemm", lambda config, architecture: None)
    checks = prefill_checks(mode)
    table = NATIVE_FORMS[mode].table
    portable = [
        product.name
        for product in native_products(mode)
        if checks._falls_back(product.op, product.operands(table, META))
    ]
    assert portable == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_no_native_kernel_is_used_unchecked(
    monkeypatch: pytest.MonkeyPatch, mode: ActivationMode
) -> None:
    """Whatever format a checkpoint has in whatever place: a kernel that hangs has to do so in the
    process of the checks.
    """
    compiled: set[tuple[object, ...]] = set()

    def note_w16(config: W16Config, architecture: str) -> None:
        compiled.add((config.format, config.out_dtype, config.gated, config.sorted))

    def note_scaled(config: ScaledConfig, architecture: str) -> None:
        compiled.add(("scaled", config.format, config.out_dtype, config.sorted))

    target = Target(META, "sm_100a", 148)
    monkeypatch.setattr(Target, "of", lambda device: target)
    monkeypatch.setattr(operands, "RandomWeights", PlannedWeights)
    monkeypatch.setattr(prefill_w16, "load_gemm", note_w16)
    monkeypatch.setattr(prefill_scaled, "load_gemm", note_scaled)
    table = native_table(mode)
    for product in native_products(mode):
        _recorded(table, product.op, product.operands(table, META))
    checked = frozenset(compiled)
    formats = [format for format in QuantFormat if format is not QuantFormat.F32]
    used = [
        *(Product("linear", format, 300, (512, 1024)) for format in formats),
        *(Product("grouped_linear", format, 300, (4, 256, 512)) for format in formats),
        *(
            Product("moe", format, 300, (512, 256, 8), shared=shared)
            for format in formats
            for shared in formats
        ),
    ]
    for product in used:
        _recorded(table, product.op, product.operands(table, META))
    assert compiled == checked
    names = {product.name for product in native_products(mode)}
    # Without values NVFP4 is taken for MXFP4 in disguise: these are known by their names.
    assert {"linear nvfp4 192x384 T=130", "moe nvfp4 384x256x8 T=130"} <= names


def test_a_check_names_the_kernel_of_its_rows() -> None:
    kernels = {check.name: check.kernel for check in checks_of(NATIVE_FORMS["fp8"].checks)}
    sizes = "192x384 T=130"
    assert kernels[f"linear bf16 {sizes}"] == kernels[f"linear nvfp4 {sizes}"] == "blackwell_w16"
    assert kernels[f"linear mxfp4 {sizes}"] == "blackwell_scaled"
    assert kernels["moe nvfp4 in disguise 384x256x8 T=130"] == "blackwell_scaled"


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_a_child_finds_the_checks(mode: ActivationMode) -> None:
    checks = checks_of(NATIVE_FORMS[mode].checks)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) > 30


@pytest.mark.parametrize(
    ("capability", "native"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_blackwell_has_native_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert runs_on_blackwell(torch.device("cuda", 0)) == native
    assert not runs_on_blackwell(torch.device("cpu"))
