"""The router and the decode kernel of the mixture of experts compile for every target, without spills, with MMA and
asynchronous copies.
"""

import pytest

from dsv4.launch.loader import ARCHITECTURES, Defines, compile_source
from tests.ops.sass import count, disassemble, resources

NAMES = ("ROUTED", "SHARED", "TOKENS", "TAILS", "WARPS", "STAGES", "PER_LANE", "HASH", "GATE_ROUNDS", "VECTORS")
# Routed and shared formats (NVFP4 0, MXFP4 1, FP8 2, BF16 3), padded tokens, tails, warps, ring depth; the routers of
# Flash and Pro: experts / 32, hash or not, pairs of gate rows per block; eights of activations per thread.
VARIANTS = {
    "nvfp4+fp8": (0, 2, 1, 0, 12, 2, 8, 0, 1, 2),
    "nvfp4+fp8 Pro": (0, 2, 1, 0, 12, 2, 12, 0, 2, 3),
    "mxfp4+bf16 T=8": (1, 3, 8, 1, 16, 1, 8, 1, 1, 1),
}


def moe_defines(*values: int) -> Defines:
    return tuple(zip(NAMES, values, strict=True))


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [*((architecture, "nvfp4+fp8 Pro") for architecture in ARCHITECTURES), ("sm_90a", "mxfp4+bf16 T=8")],
)
def test_moe_has_no_spills(architecture: str, variant: str) -> None:
    found = resources(compile_source("moe_decode", architecture, moe_defines(*VARIANTS[variant])).log)
    assert set(found) == {"moe_decode"}
    assert found["moe_decode"][1] == 0


def test_moe_uses_mma_and_asynchronous_copies() -> None:
    sass = disassemble("moe_decode", "sm_90a", moe_defines(*VARIANTS["nvfp4+fp8"]))
    # In each phase: 32 MMAs of a 4-bit stage (two row tiles of 256 columns) and 16 of an FP8 stage (128 columns).
    assert count(sass, "HMMA") >= 2 * (32 + 16)
    assert count(sass, "LDGSTS") > 0
    assert count(sass, "STL") == count(sass, "LDL") == 0


@pytest.mark.parametrize("hashed", [0, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_router_has_no_spills(architecture: str, hashed: int) -> None:
    found = resources(compile_source("router", architecture, (("PER_LANE", 12), ("HASH", hashed))).log)
    assert set(found) == {"router_select"}
    assert found["router_select"][1] == 0
