"""The Blackwell products with quantised activations compile without a GPU for every shape of Flash
and Pro, use block-scaled MMAs, spill nothing and fit a multiprocessor.
"""

import re

import pytest

from dsv4.ops.linear.cutedsl.gemm_config import (
    REGISTERS,
    TENSOR_COLUMNS,
)
from dsv4.ops.linear.cutedsl.scaled_config import MMAS, WARPS, ScaledConfig, scaled_budget
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.compiled import (
    CompiledProduct,
    assert_same_program,
    compile_once,
    largest_of_each,
)
from tests.ops.linear.scaled_configurations import configurations, name

# Processor time, so that a busy machine fails nothing.
MOST_SECONDS = 10


# By format, role and order.
WIDEST = largest_of_each(
    configurations(),
    lambda one: one.tile_tokens * one.tile_features,
    lambda one: (one.format, one.out_dtype, one.sorted),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", configurations(), ids=name)
def test_compiles_within_the_limits_of_a_multiprocessor(config: ScaledConfig) -> None:
    assert_within_limits(config, "sm_100a")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", WIDEST, ids=name)
def test_the_other_architecture_gets_the_same_program(config: ScaledConfig) -> None:
    from dsv4.ops.linear.cutedsl.blackwell_scaled import ScaledGemm

    assert_same_program(ScaledGemm, config)
    assert_within_limits(config, "sm_103a")


def compiled(config: ScaledConfig, architecture: str) -> CompiledProduct:
    from dsv4.ops.linear.cutedsl.blackwell_scaled import ScaledGemm

    return compile_once(ScaledGemm, config, architecture)


def assert_within_limits(config: ScaledConfig, architecture: str) -> None:
    """Of machine code that has the MMAs of its format and no spills."""
    found = compiled(config, architecture)
    assert found.seconds < MOST_SECONDS
    nvfp4 = config.format is QuantFormat.NVFP4
    kind = "kind::mxf4nvf4.block_scale.block16" if nvfp4 else "kind::mxf8f6f4.block_scale.block32"
    assert len(re.findall(rf"tcgen05\.mma\.cta_group::{config.ctas}\.{kind}", found.ptx)) == MMAS
    assert len(re.findall(r"\bUTCOMMA\b" if nvfp4 else r"\bUTCQMMA\b", found.sass)) == MMAS
    assert f".target {architecture}" in found.ptx
    if config.pair:
        # An allocation need not wait for that of the other CTA.
        assert found.ptx.index("tcgen05.alloc") < found.ptx.index("barrier.cluster.arrive")
    assert "griddepcontrol.wait" in found.ptx
    assert "griddepcontrol.launch_dependents" in found.ptx
    assert not found.spills
    assert found.registers * 32 * WARPS <= REGISTERS
    budget = scaled_budget(config)
    assert budget.columns <= TENSOR_COLUMNS
    assert budget.stages >= 4
