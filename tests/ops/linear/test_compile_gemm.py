"""The prefill GEMM compiles for every target; Hopper's form keeps its products asynchronous."""

import itertools
import re

import pytest

from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.linear.prefill import (
    FEW,
    MODE_DOWN,
    MODE_GATE_UP,
    MODE_LINEAR,
    NARROW,
    SOME,
    WIDE,
    Build,
    Results,
    Tile,
    build,
    build_for,
)
from dsv4.ops.linear.prefill_long import HALF, LARGE, LongForm
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import PREFILL_REGISTERS
from tests.ops.sass import (
    ASSEMBLER_IS_13_5,
    compile_once,
    count,
    disassemble,
    of_assembler_13_5,
    resources,
)

ENTRIES = {
    MODE_LINEAR: "prefill_linear",
    MODE_GATE_UP: "prefill_gate_up",
    MODE_DOWN: "prefill_down",
}
# What is launched: dense products have one tile.
VARIANTS = [
    (MODE_LINEAR, NARROW),
    *itertools.product((MODE_GATE_UP, MODE_DOWN), (FEW, SOME, NARROW, WIDE)),
]
LONG_ENTRIES = {MODE_LINEAR: "long_linear", MODE_GATE_UP: "long_gate_up", MODE_DOWN: "long_down"}
LONG_VARIANTS = [
    *itertools.product((MODE_LINEAR,), (LARGE, HALF)),
    *itertools.product((MODE_GATE_UP, MODE_DOWN), (FEW, SOME, NARROW, WIDE, LARGE)),
]
SPILLED = {(MODE_LINEAR, LARGE): 28, (MODE_LINEAR, HALF): 8, (MODE_GATE_UP, WIDE): 16}
# Rows of which blocks of 12 warps leave none idle.
FOUR_BIT = (QuantFormat.NVFP4, QuantFormat.MXFP4)
ROWS = 768
PORTABLE = "linear/prefill_gemm"
HOPPER = "linear/prefill_gemm_sm90"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", FORMAT_CODE, ids=lambda format: format.value)
@pytest.mark.parametrize(("source", "architecture"), [(PORTABLE, "sm_100a"), (HOPPER, "sm_90a")])
def test_every_variant_starts_with_the_registers_that_it_hands_out(
    source: str, architecture: str, format: QuantFormat
) -> None:
    """And wgmma stays asynchronous: the assembler serialises products whose registers it cannot
    keep apart, which costs most of the speed. What is launched on other targets starts alike, as
    tests/ops/test_launch_limits.py finds.
    """
    for mode, tile in VARIANTS:
        variant = build(source, format, mode, tile=tile)
        log = compile_once(source, architecture, variant.defines).log
        assert resources(log)[ENTRIES[mode]][0] == PREFILL_REGISTERS[variant.threads], (mode, tile)
        assert "serialized" not in log


def long_build(
    format: QuantFormat, mode: int, tile: Tile, results: Results = Results.ROUNDED
) -> Build:
    ((_, variant),) = LongForm.of(format, mode, ROWS, [tile], results).builds
    return variant


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", FORMAT_CODE, ids=lambda format: format.value)
def test_every_long_variant_has_the_registers_that_it_needs(format: QuantFormat) -> None:
    """Another number at the start, or more of them spilled, and it is slower or waits forever. What
    is spilled is stored and loaded once a tile.
    """
    for mode, tile in LONG_VARIANTS:
        variant = long_build(format, mode, tile)
        log = compile_once(variant.source, "sm_90a", variant.defines).log
        registers, spilled = resources(log)[LONG_ENTRIES[mode]]
        assert registers == PREFILL_REGISTERS[variant.threads], (mode, tile)
        assert spilled <= SPILLED.get((mode, tile), 0), (mode, tile)
        assert "serialized" not in log


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", FORMAT_CODE, ids=lambda format: format.value)
@pytest.mark.parametrize("form", ["sm_100a", "sm_90a", "long"])
def test_lists_have_the_registers_that_they_need(form: str, format: QuantFormat) -> None:
    of_a_list = Results.OF_A_LIST
    if form == "long":
        variants = [long_build(format, MODE_LINEAR, tile, of_a_list) for tile in (LARGE, HALF)]
    else:
        variants = [build_for(format, MODE_LINEAR, form, of_a_list)]
    for variant in variants:
        log = compile_once(
            variant.source, "sm_90a" if form == "long" else form, variant.defines
        ).log
        ((registers, spilled),) = resources(log).values()
        assert registers == PREFILL_REGISTERS[variant.threads]
        # Where the results of either type are stored.
        most = 88 if (form, format) == ("sm_90a", QuantFormat.FP8_BLOCK128) else 0
        if not ASSEMBLER_IS_13_5 and form == "sm_100a" and format in FOUR_BIT:
            most = 40
        assert spilled <= most
        assert "serialized" not in log


@pytest.mark.parametrize("tile", [FEW, SOME, NARROW])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_are_handed_out_in_whole(architecture: str, tile: Tile) -> None:
    variant = build_for(QuantFormat.BF16, MODE_DOWN, architecture, tile=tile)
    assert_handed_out_in_whole(variant, architecture, tile)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "tile"), LONG_VARIANTS)
def test_long_variants_hand_out_all_registers(mode: int, tile: Tile) -> None:
    assert_handed_out_in_whole(long_build(QuantFormat.BF16, mode, tile), "sm_90a", tile)


def assert_handed_out_in_whole(variant: Build, architecture: str, tile: Tile) -> None:
    sass = disassemble(variant.source, architecture, variant.defines)
    (given,) = re.findall(r"USETMAXREG\.DEALLOC\S* (0x\w+)", sass)
    (taken,) = re.findall(r"USETMAXREG\.TRY_ALLOC\S* UP\d, (0x\w+)", sass)
    groups = tile.consumers // 4
    whole = (groups + 1) * PREFILL_REGISTERS[variant.threads]
    assert int(given, 16) + groups * int(taken, 16) == whole


def test_products_and_copies() -> None:
    variant = build(HOPPER, QuantFormat.NVFP4, MODE_LINEAR)
    sass = disassemble(variant.source, "sm_90a", variant.defines)
    # Per token width (32, 64, 128): four steps of two row tiles.
    assert count(sass, "HGMMA") == 3 * 4 * 2
    few = build(HOPPER, QuantFormat.NVFP4, MODE_DOWN, tile=FEW)
    sass = disassemble(few.source, "sm_90a", few.defines)
    assert [count(sass, f"HGMMA.64x{width}x16") for width in (8, 16, 32)] == [8, 8, 8]
    assert count(sass, "LDGSTS") > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "tile"), [(MODE_LINEAR, LARGE), (MODE_GATE_UP, WIDE), (MODE_DOWN, LARGE)]
)
@pytest.mark.parametrize("format", [QuantFormat.NVFP4, QuantFormat.FP8_BLOCK128])
def test_a_stage_moves_nothing_that_products_share(
    format: QuantFormat, mode: int, tile: Tile
) -> None:
    """No register to a uniform one, and none from or to where registers are spilled."""
    for stage in between_products(long_build(format, mode, tile)):
        assert [count(stage, name) for name in ("R2UR", "LDL", "STL")] == [0, 0, 0]


@of_assembler_13_5
@pytest.mark.parametrize("mode", [MODE_GATE_UP, MODE_DOWN])
def test_nvfp4_is_decoded_in_few_instructions(mode: int) -> None:
    """They are what experts of few tokens wait for, more than for memory."""
    for stage in between_products(long_build(QuantFormat.NVFP4, mode, FEW)):
        assert len(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+[@A-Z]", stage, re.MULTILINE)) <= 122


def between_products(variant: Build) -> list[str]:
    """The machine code from the first to the last product of a stage, for every width of tokens."""
    lines = disassemble(variant.source, "sm_90a", variant.defines).splitlines()
    products: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        found = re.search(r"HGMMA\.64x(\d+)x16", line)
        if found is not None:
            products.setdefault(found[1], []).append(at)
    assert len(products) == 3
    return ["\n".join(lines[first:last]) for first, *_, last in products.values()]


@pytest.mark.parametrize(
    ("source", "kernels"),
    [("moe_sort", {"moe_sort"}), ("moe_combine", {"moe_combine", "moe_combine_partial"})],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sort_and_combine_compile(architecture: str, source: str, kernels: set[str]) -> None:
    assert set(resources(compile_once(f"moe/{source}", architecture).log)) == kernels
