"""Hyper-connection, norm and sampling kernels compile for every target without spilling; no GPU needed."""

import re

import pytest

from dsv4.launch.loader import ARCHITECTURES, Defines, compile_source
from tests.ops.sass import count, disassemble, resources


def named(**values: int) -> Defines:
    return tuple(values.items())


SEAM, HEAD = {"STREAMS": 4, "MIXES": 24}, {"STREAMS": 4, "MIXES": 4}
PREFILL = {"SPLITS": 1}
QUARTER_ROW = {"COUNT": 8, "GROUPS": 1, "WORKERS": 224, "BLOCKS": 4}
CLUSTER = {"BLOCKS": 8, "VECTOR": 1}
KERNELS: dict[str, tuple[str, Defines]] = {
    "norm": ("rms_norm", named(COUNT=8, GROUPS=1)),
    "norm of any width": ("rms_norm", named(COUNT=1, GROUPS=8)),
    "seam": ("hyper_connection", named(**SEAM, POST=1, COUNT=4, PER_LANE=2, TOKENS=1)),
    "seam of a narrow model": ("hyper_connection", named(**SEAM, POST=1, COUNT=4, PER_LANE=1, TOKENS=1)),
    "pre": ("hyper_connection", named(**SEAM, POST=0, COUNT=4, PER_LANE=2, TOKENS=1)),
    "head": ("hyper_connection", named(**HEAD, POST=0, COUNT=4, PER_LANE=2, TOKENS=1)),
    "seam of any width": ("hyper_connection", named(**SEAM, POST=1, COUNT=1, PER_LANE=2, TOKENS=1)),
    "eight streams": ("hyper_connection", named(STREAMS=8, MIXES=80, POST=1, COUNT=4, PER_LANE=1, TOKENS=1)),
    "finish": ("hyper_connection_finish", named(**SEAM, SPLITS=112, **QUARTER_ROW)),
    "finish of the head": ("hyper_connection_finish", named(**HEAD, SPLITS=112, **QUARTER_ROW)),
    "finish of many tokens": (
        "hyper_connection_finish",
        named(**SEAM, SPLITS=1, COUNT=8, GROUPS=2, WORKERS=448, BLOCKS=1),
    ),
    "post": ("hyper_connection_post", named(STREAMS=4, COUNT=8)),
    "prefill seam": ("hyper_connection_prefill", named(**SEAM, **PREFILL, POST=1)),
    "prefill pre": ("hyper_connection_prefill", named(**SEAM, **PREFILL, POST=0)),
    "prefill head": ("hyper_connection_prefill", named(**HEAD, **PREFILL, POST=0)),
    "draw": ("sampling", named(**CLUSTER, VALUES=16, TOP_P=0)),
    "top-p draw": ("sampling", named(**CLUSTER, VALUES=16, TOP_P=1)),
}


EVERY_TARGET = ("norm", "seam", "pre", "head", "finish", "post", "draw")


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ("prefill seam", "top-p draw")])
def test_compiles_without_spills(kernel: str) -> None:
    source, defines = KERNELS[kernel]
    for architecture in ARCHITECTURES if kernel in EVERY_TARGET else ARCHITECTURES[:1]:
        found = resources(compile_source(source, architecture, defines).log)
        assert found
        assert {name: spill for name, (_, spill) in found.items()} == dict.fromkeys(found, 0), architecture


@pytest.mark.parametrize("kernel", ["prefill seam", "top-p draw"])
def test_compiles_almost_without_spills(kernel: str) -> None:
    """All 128 or 64 registers are in use: a value or two may be spilled, depending on the compiler's version."""
    source, defines = KERNELS[kernel]
    for architecture in ARCHITECTURES:
        found = resources(compile_source(source, architecture, defines).log)
        assert max(spill for _, spill in found.values()) <= 32, architecture


def test_decode_weights_are_fetched_before_the_wait() -> None:
    """6 loads of 16 bytes per lane, all above the first load that depends on another kernel."""
    sass = disassemble(KERNELS["seam"][0], "sm_90a", KERNELS["seam"][1])
    before, _, after = sass.partition("ACQBULK")
    assert len(re.findall(r"LDG\S*\.128\S*\.CONSTANT", before)) == 6
    assert not re.search(r"LDG\S*\.CONSTANT", after)
    assert count(after, "LDG.E.64") >= 5


@pytest.mark.parametrize(("kernel", "loads"), [("norm", 2), ("finish", 2)])
def test_norm_weights_are_fetched_before_the_wait(kernel: str, loads: int) -> None:
    before, _, after = disassemble(KERNELS[kernel][0], "sm_90a", KERNELS[kernel][1]).partition("ACQBULK")
    assert len(re.findall(r"LDG\S*\.128\S*\.CONSTANT", before)) == loads
    assert not re.search(r"LDG\S*\.CONSTANT", after)


def test_prefill_products_run_on_the_tensor_cores() -> None:
    """Two of the streams at a time × 3 row tiles × 4 steps × 2 halves of fn."""
    sass = disassemble(KERNELS["prefill seam"][0], "sm_90a", KERNELS["prefill seam"][1])
    assert count(sass, "HMMA.1688.F32.TF32") == 48
