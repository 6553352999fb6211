"""The prefill GEMM compiles for every target; Hopper's form keeps its products asynchronous."""

import pytest

from dsv4.launch.compiler import compile_source
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.linear.prefill import MODE_DOWN, MODE_GATE_UP, MODE_LINEAR, build
from dsv4.weights.quant import QuantFormat
from tests.ops.sass import count, disassemble, resources

ENTRIES = {
    MODE_LINEAR: "prefill_linear",
    MODE_GATE_UP: "prefill_gate_up",
    MODE_DOWN: "prefill_down",
}
# 384 threads start with 65536 / 384 registers; the warpgroups then share them out again.
MAX_REGISTERS = 168
# Format, mode, set of token widths.
VARIANTS = [
    (QuantFormat.NVFP4, MODE_GATE_UP, True),
    (QuantFormat.MXFP4, MODE_DOWN, False),
    (QuantFormat.FP8_BLOCK128, MODE_GATE_UP, True),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_portable_form_compiles(architecture: str) -> None:
    variant = build("linear/prefill_gemm", QuantFormat.BF16, MODE_LINEAR)
    found = resources(compile_source(variant.source, architecture, variant.defines).log)
    assert found["prefill_linear"][0] <= MAX_REGISTERS


@pytest.mark.parametrize(
    ("format", "mode", "wide"), VARIANTS, ids=lambda value: str(getattr(value, "value", value))
)
def test_wgmma_stays_asynchronous(format: QuantFormat, mode: int, wide: bool) -> None:
    """The assembler serialises products whose registers it cannot keep apart, which costs most of
    the speed.
    """
    variant = build("linear/prefill_gemm_sm90", format, mode, wide=wide)
    log = compile_source(variant.source, "sm_90a", variant.defines).log
    assert "serialized" not in log
    assert resources(log)[ENTRIES[mode]][0] <= MAX_REGISTERS


def test_products_and_copies() -> None:
    variant = build("linear/prefill_gemm_sm90", QuantFormat.NVFP4, MODE_LINEAR)
    sass = disassemble(variant.source, "sm_90a", variant.defines)
    # Per token width (32, 64, 128): four steps of two row tiles.
    assert count(sass, "HGMMA") == 3 * 4 * 2
    assert count(sass, "LDGSTS") > 0


@pytest.mark.parametrize("source", ["moe_sort", "moe_combine"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sort_and_combine_compile(architecture: str, source: str) -> None:
    assert set(resources(compile_source(f"moe/{source}", architecture).log)) == {source}
