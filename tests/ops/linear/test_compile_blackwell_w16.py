"""The Blackwell kernels with 16-bit activations compile without a GPU, multiply by tcgen05, spill
nothing and fit a multiprocessor.
"""

import re

import pytest

from dsv4.ops.linear.cutedsl.gemm_config import REGISTERS, SMEM_BYTES, W16Config, budget
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.blackwell_problems import ARCHITECTURES, configurations, identifier
from tests.ops.linear.compiled import compile_once

STEPS = 4
# Processor time, so that a busy machine fails nothing.
MOST_SECONDS = 10


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", configurations(), ids=identifier)
def test_compiles_without_a_gpu(config: W16Config, architecture: str) -> None:
    from dsv4.ops.linear.cutedsl.blackwell_w16 import BlackwellW16

    found = compile_once(BlackwellW16, config, architecture)
    assert found.seconds < MOST_SECONDS
    assert f".target {architecture}" in found.ptx
    products = STEPS * config.sides
    assert len(re.findall(r"\btcgen05\.mma\.cta_group::1\.kind::f16\b", found.ptx)) == products
    assert len(re.findall(r"\bUTCHMMA\b", found.sass)) == products
    # Fragments of two row tiles a warp and side.
    stores = len(re.findall(r"tcgen05\.st\.sync\.aligned\.16x128b\.x8", found.ptx))
    assert stores == 2 * config.sides
    assert len(re.findall(r"tile::gather4", found.ptx)) == int(config.gathers)
    assert "griddepcontrol.wait" in found.ptx
    assert "griddepcontrol.launch_dependents" in found.ptx
    assert not found.spills
    assert found.registers * config.threads <= REGISTERS
    assert budget(config).smem_bytes <= SMEM_BYTES
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[[^]]*\],\s*(%r\d+)", found.ptx)
    assert re.findall(rf"mov\.b32\s+{register},\s*(\d+)", found.ptx) == ["512"]


def test_formats_of_experts_and_of_dense_products_are_among_the_cases() -> None:
    formats = {(config.sorted, config.format) for config in configurations()}
    assert formats == {
        *((False, format) for format in (QuantFormat.NVFP4, QuantFormat.FP8_BLOCK128)),
        (False, QuantFormat.BF16),
        *((True, format) for format in (QuantFormat.NVFP4, QuantFormat.MXFP4)),
    }
