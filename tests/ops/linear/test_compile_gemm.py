"""The prefill GEMM compiles for every target; Hopper's form keeps its products asynchronous."""

import itertools
import re

import pytest

from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.linear.prefill import MODE_DOWN, MODE_GATE_UP, MODE_LINEAR, build, build_for
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import PREFILL_REGISTERS
from tests.ops.sass import compile_once, count, disassemble, resources

ENTRIES = {
    MODE_LINEAR: "prefill_linear",
    MODE_GATE_UP: "prefill_gate_up",
    MODE_DOWN: "prefill_down",
}
PORTABLE = "linear/prefill_gemm"
HOPPER = "linear/prefill_gemm_sm90"


@pytest.mark.parametrize("format", FORMAT_CODE, ids=lambda format: format.value)
@pytest.mark.parametrize(("source", "architecture"), [(PORTABLE, "sm_100a"), (HOPPER, "sm_90a")])
def test_every_variant_starts_with_the_registers_that_it_hands_out(
    source: str, architecture: str, format: QuantFormat
) -> None:
    """And wgmma stays asynchronous: the assembler serialises products whose registers it cannot
    keep apart, which costs most of the speed. What is launched on other targets starts alike, as
    tests/ops/test_launch_limits.py finds.
    """
    for mode, wide in itertools.product(ENTRIES, (False, True)):
        variant = build(source, format, mode, wide=wide)
        log = compile_once(source, architecture, variant.defines).log
        assert resources(log)[ENTRIES[mode]][0] == PREFILL_REGISTERS, (mode, wide)
        assert "serialized" not in log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_are_handed_out_in_whole(architecture: str) -> None:
    variant = build_for(QuantFormat.BF16, MODE_LINEAR, architecture)
    sass = disassemble(variant.source, architecture, variant.defines)
    (given,) = re.findall(r"USETMAXREG\.DEALLOC\S* (0x\w+)", sass)
    (taken,) = re.findall(r"USETMAXREG\.TRY_ALLOC\S* UP\d, (0x\w+)", sass)
    assert int(given, 16) + 2 * int(taken, 16) == 3 * PREFILL_REGISTERS


def test_products_and_copies() -> None:
    variant = build(HOPPER, QuantFormat.NVFP4, MODE_LINEAR)
    sass = disassemble(variant.source, "sm_90a", variant.defines)
    # Per token width (32, 64, 128): four steps of two row tiles.
    assert count(sass, "HGMMA") == 3 * 4 * 2
    assert count(sass, "LDGSTS") > 0


@pytest.mark.parametrize(
    ("source", "kernels"),
    [("moe_sort", {"moe_sort"}), ("moe_combine", {"moe_combine", "moe_combine_partial"})],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sort_and_combine_compile(architecture: str, source: str, kernels: set[str]) -> None:
    assert set(resources(compile_once(f"moe/{source}", architecture).log)) == kernels
