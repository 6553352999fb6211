"""The compressor's kernels compile for every architecture, without spills."""

import pytest

from dsv4.launch.kernel import Kernel
from dsv4.launch.target import ARCHITECTURES
from tests.ops.compressor.meta import SHAPES, arguments, record
from tests.ops.sass import compile_once, count, disassemble, of_assembler_13_5, resources


def kernel(name: str) -> Kernel:
    (launch,) = record(arguments(name, 1))
    return launch.shape.kernel


@pytest.mark.sampled(2)
@of_assembler_13_5
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills(name: str, architecture: str) -> None:
    found = kernel(name)
    log = compile_once(found.source, architecture, found.defines).log
    entries = resources(log)
    assert set(entries) == {"compress", "compress_ring"}
    for function, (registers, spilled_bytes) in entries.items():
        assert spilled_bytes == 0, f"{function}: {spilled_bytes} bytes at {registers} registers"


def test_rotary_bytes_are_cut_from_integers() -> None:
    """CUDA 13.0 once made the low byte of a bfloat16 by a second floating-point conversion."""
    found = kernel("csa")
    assert count(disassemble(found.source, "sm_90a", found.defines), "F2I.U8") == 0
