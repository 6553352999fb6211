"""The launch before attention compiles for every architecture and kind of layer, without spills or
fences.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.launch.kernel import Kernel
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.prepare_attention.cases import RATIOS, step
from tests.ops.recorded import launches
from tests.ops.sass import compile_once, count, disassemble, of_assembler_13_5, resources


def kernel(kind: str, quantised: bool = True) -> Kernel:
    """That of a model's step, where the seam has left its comb."""
    with torch.device("meta"):
        case = step(kind, 0, 1, quantised=quantised)
    (launch,) = launches(prepare_attention, *case.arguments(), tokens=1)
    found = launch.shape.kernel
    defines = {**dict(found.defines), "STREAMS": 4}
    return replace(found, defines=tuple(defines.items()))


def sass_of(kind: str) -> str:
    return disassemble(kernel(kind).source, "sm_90a", kernel(kind).defines)


@pytest.mark.sampled(2)
@of_assembler_13_5
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", RATIOS)
def test_compiles_without_spills(kind: str, quantised: bool, architecture: str) -> None:
    of_layer = kernel(kind, quantised)
    compiled = compile_once(of_layer.source, architecture, of_layer.defines)
    ((registers, spilled_bytes),) = resources(compiled.log).values()
    assert spilled_bytes == 0, f"{spilled_bytes} bytes spilled at {registers} registers"


@pytest.mark.parametrize(("kind", "roles"), [("window", 2), ("csa", 5), ("hca", 3)])
def test_every_role_waits_once_and_no_role_fences(kind: str, roles: int) -> None:
    """Blocks of a cluster exchange sums by messages, not by stores and a barrier with a fence of
    the whole GPU.
    """
    sass = sass_of(kind)
    assert count(sass, "ACQBULK") == roles
    assert count(sass, "MEMBAR") == 0
    assert count(sass, "STAS") == (1 if kind == "hca" else 0)


@of_assembler_13_5
@pytest.mark.parametrize(("kind", "windows"), [("window", 0), ("csa", 2), ("hca", 1)])
def test_constants_are_requested_before_the_wait(kind: str, windows: int) -> None:
    """Rows: 16 norm weights a lane of the window key and a frequency. Windows: a norm weight and a
    frequency.
    """
    *before_waits, _ = sass_of(kind).split("ACQBULK")
    assert [count(code, "LDG.E.NA.128.CONSTANT") for code in before_waits].count(4) == 1
    assert [count(code, "LDG.E.CONSTANT") >= 2 for code in before_waits].count(True) == windows


@pytest.mark.parametrize("kind", RATIOS)
def test_rows_are_no_read_only_loads(kind: str) -> None:
    """The kernels in front write them, and the wait does not order read-only loads. Norm weights
    are such loads.
    """
    sass = sass_of(kind)
    assert count(sass, "LDG.E.NA.128") == 6
    assert count(sass, "LDG.E.NA.128.CONSTANT") == 4


def test_rotary_bytes_are_cut_from_integers() -> None:
    """CUDA 13.0 once made the low byte of a bfloat16 by a second floating-point conversion."""
    assert count(sass_of("csa"), "F2I.U8") == 0
