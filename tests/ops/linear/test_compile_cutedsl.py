"""The CuTe DSL GEMMs compile for sm_90a without a GPU, use wgmma with weights in registers, and
spill nothing.
"""

import os
import re

import pytest
import torch

from dsv4.weights.quant import QuantFormat
from tests.ops.linear.compiled import compile_once


@pytest.mark.parametrize(
    ("format", "tile_tokens", "warpgroups", "cluster"),
    [
        (QuantFormat.MXFP4, 32, 1, 1),
        (QuantFormat.NVFP4, 256, 2, 1),
        (QuantFormat.FP8_BLOCK128, 256, 2, 1),
        (QuantFormat.BF16, 128, 2, 2),
    ],
)
def test_compiles_without_a_gpu(
    format: QuantFormat,
    tile_tokens: int,
    warpgroups: int,
    cluster: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The architecture is passed on, not taken from the environment.
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.hopper_gemm import STEPS, GemmConfig, HopperGemm

    config = GemmConfig(format, jit.DTYPES[torch.bfloat16], tile_tokens, warpgroups, cluster, 132)
    found = compile_once(HopperGemm, config, "sm_90a")
    ptx = found.ptx
    name = rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile_tokens}k16\.f32\.bf16\.bf16"
    register_operand = r"\s*\{[^}]*\},\s*\{[^}]*\},"
    assert len(re.findall(name, ptx)) == len(re.findall(name + register_operand, ptx)) == STEPS
    assert ".target sm_90a" in ptx
    assert "CUTE_DSL_ARCH" not in os.environ
    multicast = "multicast::cluster" in ptx
    assert multicast == (cluster > 1)
    assert "griddepcontrol.wait" in ptx

    # setmaxnreg hands out what the launch reserved; asking for more would wait forever.
    reserved = found.registers * 128 * (1 + warpgroups)
    (producer,), (consumer,) = (
        re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32\s+(\d+)", ptx) for way in ("dec", "inc")
    )
    assert 128 * (int(producer) + warpgroups * int(consumer)) <= reserved
    if format is QuantFormat.BF16:
        # The compiler must not move the rounding of the accumulators before the wait for the last
        # MMAs.
        assert ptx.index("cvt.rn.bf16x2.f32") > max(
            found.start() for found in re.finditer(r"wgmma\.wait_group", ptx)
        )
    assert len(re.findall(r"\bHGMMA\b", found.sass)) == STEPS
    assert not found.spills
