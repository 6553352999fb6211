"""The prefill attention kernels compile for every target without spilling registers."""

from dataclasses import replace

import pytest

from dsv4.caches.rows import RowFormat
from dsv4.launch.target import ARCHITECTURES
from tests.ops.attention.meta import Case
from tests.ops.recorded import BLACKWELL, HOPPER, functions
from tests.ops.sass import compile_once, resources

CASES = {"real": Case(64, 4, 512), "tiny": Case(4, 4, 16, width=64, rope_width=16)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(architecture: str, name: str) -> None:
    dequantize, attend = (launch.shape.kernel for launch in CASES[name].record(512, BLACKWELL))
    assert (dequantize.source, dequantize.defines) == (attend.source, attend.defines)
    found = resources(compile_once(attend.source, architecture, attend.defines).log)
    assert set(found) == {"attention_prefill", "attention_prefill_dequantize"}
    assert {spills for _, spills in found.values()} == {0}


@pytest.mark.parametrize("rope_width", [8, 24])
def test_bf16_rows_of_other_rotary_widths_compile(rope_width: int) -> None:
    """Fp8 rows of such widths have another kernel, which reads them as they are stored."""
    case = Case(4, 4, 16, format=RowFormat.PLAIN, width=64, rope_width=rope_width)
    (attend,) = (launch.shape.kernel for launch in case.record(512, BLACKWELL))
    found = resources(compile_once(attend.source, "sm_100a", attend.defines).log)
    assert {name: spills for name, (_, spills) in found.items()} == {"attention_prefill": 0}
    fp8 = replace(case, format=RowFormat.KV_FP8).record(512, BLACKWELL)
    assert functions(fp8) == ["attention_any_geometry"]


# Heads; registers of the threads that multiply and of those that copy. In front of their exchange
# all groups of 128 threads have as many as they share out again: with one less, the last would wait
# forever.
SHARED_OUT = {128: (224, 224, 56), 32: (192, 64), 16: (152, 104)}


@pytest.mark.parametrize("heads", SHARED_OUT)
def test_wgmma_products_are_not_serialised(heads: int) -> None:
    """The assembler says so when it has to wait after every product because accumulators are
    touched in between.

    A few loop constants may spill where the accumulators fill the registers.
    """
    *_, attend = (launch.shape.kernel for launch in Case(heads, 4, 512).record(512, HOPPER))
    compiled = compile_once(attend.source, "sm_90a", attend.defines)
    registers, spills = resources(compiled.log)[attend.function]
    assert len(SHARED_OUT[heads]) * registers == sum(SHARED_OUT[heads])
    assert spills <= 32
    assert "serialized" not in compiled.log
