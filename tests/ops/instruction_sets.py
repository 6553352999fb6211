"""Prefill products on the GPU by either set of instructions, where it has both."""

from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4.ops.linear.prefill import Build, build_for
from dsv4.weights.quant import QuantFormat

INSTRUCTION_SETS = ("mma", "wgmma")


def use_instructions(
    instructions: str, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType
) -> None:
    """Kernels that ``modules`` choose by ``build_for`` have these ``instructions``; skips the test
    where the GPU lacks them.
    """
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if instructions == "wgmma" and not hopper:
        pytest.skip("wgmma is Hopper's")
    if instructions == "mma" and hopper:
        for module in modules:
            monkeypatch.setattr(module, "build_for", _portable_build)


def _portable_build(format: QuantFormat, mode: int, _: str, *results: Any, **tile: Any) -> Build:
    """The choice on a GPU without wgmma."""
    return build_for(format, mode, "sm_100a", *results, **tile)
