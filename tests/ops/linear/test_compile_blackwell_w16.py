"""The Blackwell kernels with 16-bit activations compile without a GPU, multiply by tcgen05, spill
nothing and fit a multiprocessor.
"""

import re

import pytest

from dsv4.ops.linear.cutedsl.gemm_config import REGISTERS, W16Config
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.blackwell_problems import configurations, identifier
from tests.ops.linear.compiled import (
    CompiledProduct,
    assert_same_program,
    compile_once,
    largest_of_each,
)

STEPS = 4
# Processor time, so that a busy machine fails nothing.
MOST_SECONDS = 10


# By format, role and dtype of the result.
WIDEST = largest_of_each(
    configurations(),
    lambda one: one.tile_tokens * one.sides,
    lambda one: (one.format, one.out_dtype, one.gated, one.sorted),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", configurations(), ids=identifier)
def test_compiles_without_a_gpu(config: W16Config) -> None:
    assert_within_limits(config, "sm_100a")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", WIDEST, ids=identifier)
def test_the_other_architecture_gets_the_same_program(config: W16Config) -> None:
    from dsv4.ops.linear.cutedsl.blackwell_w16 import BlackwellW16

    assert_same_program(BlackwellW16, config)
    assert_within_limits(config, "sm_103a")


def compiled(config: W16Config, architecture: str) -> CompiledProduct:
    from dsv4.ops.linear.cutedsl.blackwell_w16 import BlackwellW16

    return compile_once(BlackwellW16, config, architecture)


def assert_within_limits(config: W16Config, architecture: str) -> None:
    """Of machine code that has the products and copies of its form and no spills."""
    found = compiled(config, architecture)
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
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[[^]]*\],\s*(%r\d+)", found.ptx)
    assert re.findall(rf"mov\.b32\s+{register},\s*(\d+)", found.ptx) == ["512"]


def test_formats_of_experts_and_of_dense_products_are_among_the_cases() -> None:
    formats = {(config.sorted, config.format) for config in configurations()}
    assert formats == {
        *((False, format) for format in (QuantFormat.NVFP4, QuantFormat.FP8_BLOCK128)),
        (False, QuantFormat.BF16),
        *((True, format) for format in (QuantFormat.NVFP4, QuantFormat.MXFP4)),
    }
