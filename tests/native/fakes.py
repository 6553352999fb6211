"""Native kernels that are none: tables of torch ops, and checks that a child process runs, with a
planted fault or without.
"""

import os
import time
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.native.check import Check, Verdict
from dsv4.native.difference import PRODUCT, difference
from dsv4.native.form import NativeForm
from dsv4.native.run_checks import run_checks
from dsv4.ops import TORCH, TORCH_PACKING
from dsv4.ops.linear import linear
from dsv4.ops.tables import DirectTable
from dsv4.weights.quant import QuantTensor, Weight

CPU = torch.device("cpu")
KERNEL = "fake_gemm"
LIMITS = (3.0, 12.0, 48.0)
_HOURS = 10_000


def wrong_linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """A product that lost its last row of weights."""
    y = linear(x, weight, out_dtype)
    y[:, -1] = 0
    return y


def failing_linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """A launch that the device refuses."""
    raise RuntimeError("CUDA driver error: CUDA_ERROR_INVALID_VALUE at a launch of fake_gemm")


def right() -> list[Check]:
    return [_check("small", lambda device: None), _check("real", _compared(linear))]


def wrong() -> list[Check]:
    return [_check("small", lambda device: None), _check("real", _compared(wrong_linear))]


def refused() -> list[Check]:
    return [*right(), _check("large", _compared(failing_linear)), _check("last", lambda _: None)]


def hanging() -> list[Check]:
    return [*right(), _check("large", _sleep), _check("last", lambda _: None)]


def crashing() -> list[Check]:
    return [_check("small", lambda device: os.abort())]


def without_memory() -> list[Check]:
    return [_check("small", _out_of_memory), _check("real", lambda device: None)]


def run_hanging(checks: str, device: torch.device) -> Verdict:
    """The verdict of ``hanging`` checks with the first of ``LIMITS`` within which the child came to
    the one that hangs: a busy machine starts it late.
    """
    for seconds in LIMITS:
        verdict = run_checks(checks, device, seconds)
        if [result.outcome for result in verdict.results[:2]] == ["passed", "passed"]:
            return verdict
    raise AssertionError(f"within {LIMITS[-1]:g} s: {verdict}")


def form(checks: str = "right", table: DirectTable | None = None) -> NativeForm:
    """A native form of the CPU with the checks of this name."""
    chosen = table or DirectTable(TORCH_PACKING, replace(TORCH, linear=_native_linear))
    return NativeForm(chosen, f"{__name__}:{checks}", lambda device: device.type == "cpu")


def table_of(linear_op: object) -> DirectTable:
    """The torch ops with this ``linear``."""
    return DirectTable(TORCH_PACKING, replace(TORCH, linear=linear_op))


def _native_linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    return linear(x, weight, out_dtype)


def _check(name: str, run: object) -> Check:
    return Check(name, KERNEL, run)  # type: ignore[arg-type]


def _compared(native: object):
    def run(device: torch.device) -> str | None:
        weight = QuantTensor.dense(torch.ones(8, 16, dtype=torch.bfloat16, device=device))
        x = torch.ones(9, 16, dtype=torch.bfloat16, device=device)
        return difference(native(x, weight), linear(x, weight), PRODUCT)  # type: ignore[operator]

    return run


def _sleep(_: torch.device) -> None:
    time.sleep(_HOURS)


def _out_of_memory(_: torch.device) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")
