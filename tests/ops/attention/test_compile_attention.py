"""The decode attention kernels and the ops around them compile for every target without spilling
registers.
"""

import dataclasses

import pytest

from dsv4.caches.rows import RowFormat
from dsv4.launch.kernel import Kernel
from dsv4.launch.target import ARCHITECTURES
from tests.ops.attention.meta import FORMATS, Case
from tests.ops.recorded import BLACKWELL
from tests.ops.sass import compile_once, count, disassemble, resources

CASES = {
    "Flash CSA": Case(64, 4, 512),
    "Pro CSA": Case(128, 4, 1024),
    "Pro CSA of 8 ranks": Case(16, 4, 1024),
    "Flash HCA at a million tokens": Case(64, 128, None, 8192),
}


def kernel(name: str, format: RowFormat) -> Kernel:
    """Of a step of one token. A B200 has room for four clusters that share keys."""
    case = dataclasses.replace(CASES[name], format=format)
    (launch,) = case.record(1, BLACKWELL)
    return launch.shape.kernel


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("name", CASES)
def test_attention_decode_does_not_spill(name: str, format: RowFormat, architecture: str) -> None:
    of_case = kernel(name, format)
    assert dict(of_case.defines)["SPLITS"] == (4 if "HCA" in name else 1)
    compiled = compile_once(of_case.source, architecture, of_case.defines)
    registers, spills = resources(compiled.log)["attention_decode"]
    assert spills == 0
    assert registers <= 255


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("source", "entries"),
    [
        ("attention/attention_any_geometry", ("attention_any_geometry",)),
        ("kv_write/kv_write", ("kv_write", "kv_write_any_geometry")),
        ("rope/query_rope", ("query_rope", "query_rope_any_geometry")),
    ],
)
def test_the_ops_around_it_do_not_spill(
    architecture: str, source: str, entries: tuple[str, ...]
) -> None:
    found = resources(compile_once(source, architecture).log)
    assert {name: spills for name, (_, spills) in found.items()} == dict.fromkeys(entries, 0)


def test_codes_take_one_conversion_per_pair_and_rows_are_copied_asynchronously() -> None:
    """e4m3 pairs become f16 pairs in one instruction, which is faster than three bit operations,
    also measured.
    """
    pro = kernel("Pro CSA", RowFormat.KV_FP8)
    sass = disassemble(pro.source, "sm_90a", pro.defines)
    products = count(sass, "HMMA.16816.F32")
    assert 32 <= count(sass, "F2FP.F16.E4M3.UNPACK_B") <= 2 * products
    assert count(sass, "LDGSTS.E.BYPASS.128") >= 9
