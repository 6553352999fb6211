"""The router and the decode kernel of the mixture of experts compile for every target, without
spills, with MMA and asynchronous copies.
"""

from dataclasses import replace

import pytest

from dsv4.launch.kernel import Kernel
from dsv4.launch.recording import Recording
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.moe import decode
from dsv4.ops.router.prefill import route
from tests.ops.moe.meta_layer import BF16, FLASH, MXFP4, PRO, Geometry, launches, step
from tests.ops.recorded import HOPPER
from tests.ops.sass import compile_once, count, disassemble, resources, without_an_encoding

# One of each kind: plain and ragged widths, one and many tokens, learned and hash routers.
PRO_STEP = (PRO, 1)
WIDE_STEP = (PRO, 4)
FLASH_STEP = (FLASH, 1)
RAGGED_STEP = (Geometry(2080, 1000, 256, 6, (MXFP4, BF16), hashed=True), 8)


def decode_kernel(geometry: Geometry, tokens: int, architecture: str = "sm_90a") -> Kernel:
    recording = Recording(replace(HOPPER, architecture=architecture), tokens)
    inputs = step(recording, geometry)
    decode.moe(recording, *inputs, geometry.router(), *geometry.weights(), 10.0)
    (launch,) = launches(recording)
    return launch.shape.kernel


def router_kernel(geometry: Geometry) -> Kernel:
    recording = Recording(HOPPER, 64)
    route(recording, *step(recording, geometry), geometry.router())
    return launches(recording)[-1].shape.kernel


def assert_no_spills(kernel: Kernel, architecture: str) -> None:
    found = resources(compile_once(kernel.source, architecture, kernel.defines).log)
    assert set(found) == {kernel.function}
    assert found[kernel.function][1] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("architecture", "decode_step"),
    [
        *((architecture, PRO_STEP) for architecture in ARCHITECTURES),
        ("sm_90a", WIDE_STEP),
        ("sm_90a", RAGGED_STEP),
    ],
)
def test_moe_has_no_spills(architecture: str, decode_step: tuple[Geometry, int]) -> None:
    assert_no_spills(decode_kernel(*decode_step, architecture), architecture)


def test_moe_uses_mma_and_asynchronous_copies() -> None:
    kernel = decode_kernel(*FLASH_STEP)
    sass = disassemble(kernel.source, "sm_90a", kernel.defines)
    # In each phase: 32 MMAs of a 4-bit stage (two row tiles of 256 columns) and 16 of an FP8 stage
    # (128 columns).
    assert count(sass, "HMMA") >= 2 * (32 + 16)
    assert count(sass, "LDGSTS") > 0
    # Hidden rows, past L1.
    assert count(sass, "LDG.E.128.STRONG.GPU") > 0
    assert count(sass, "STG.E.64.STRONG.GPU") > 0
    assert count(sass, "STL") == count(sass, "LDL") == 0


def test_warps_of_the_experts_stay_together() -> None:
    """The compiler knows that no branch parts the lanes of a warp: none is taken lane by lane, and
    what copies need is not moved to uniform registers for each of them.
    """
    kernel = decode_kernel(*FLASH_STEP)
    sass = disassemble(kernel.source, "sm_90a", kernel.defines)
    assert "BRA.DIV" not in sass
    assert count(sass, "R2UR") < count(sass, "LDGSTS") / 4


@pytest.mark.parametrize("decode_step", [FLASH_STEP, WIDE_STEP, RAGGED_STEP])
def test_copies_of_the_experts_have_an_encoding(decode_step: tuple[Geometry, int]) -> None:
    kernel = decode_kernel(*decode_step)
    assert not without_an_encoding(disassemble(kernel.source, "sm_90a", kernel.defines))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_router_has_no_spills(architecture: str, hashed: bool) -> None:
    assert_no_spills(router_kernel(replace(PRO, hashed=hashed)), architecture)
