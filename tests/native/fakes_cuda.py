"""Native kernels that are none, on a GPU: Hopper's CuTe DSL products, and faults of a device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.native.check import Check
from dsv4.native.form import NativeForm
from dsv4.native.prefill_checks import (
    PrefillChecks,
    grouped_products,
    linear_products,
    mixtures,
)
from dsv4.native.quantiser_checks import quantiser_checks
from dsv4.ops import Ops
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.tables import CUDA_TABLE, CUTEDSL_TABLE, RecordedTable
from dsv4.weights.quant import QuantFormat

KERNEL = "fake_gemm"
# Cycles of some decades.
_FOREVER = 1 << 60


def hopper() -> list[Check]:
    """Products that a GPU of today has twice, as the checks of native ones."""
    checks = PrefillChecks("hopper_gemm", CUTEDSL_TABLE, CUDA_TABLE)
    formats = (QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16)
    made = [product for format in formats for product in linear_products(format)]
    made += [*grouped_products(QuantFormat.FP8_BLOCK128), *mixtures(QuantFormat.NVFP4)]
    return [checks.check(product) for product in made]


def quantisers() -> list[Check]:
    """They are CUDA C++ for every GPU."""
    return [check for format in ActivationFormat for check in quantiser_checks(format)]


def portable_twice() -> list[Check]:
    """A launcher that falls back to the portable kernel."""
    checks = PrefillChecks(KERNEL, CUDA_TABLE, CUDA_TABLE)
    return [checks.check(next(linear_products(QuantFormat.BF16)))]


def wrong() -> list[Check]:
    checks = PrefillChecks(KERNEL, faulty(lose_a_column), CUDA_TABLE)
    return [checks.check(next(linear_products(QuantFormat.BF16)))]


def spinning() -> list[Check]:
    return [Check("large", KERNEL, _spin), Check("last", KERNEL, lambda device: None)]


def asserting() -> list[Check]:
    """An error that no later call of the process survives."""
    return [Check("large", KERNEL, _assert), Check("last", KERNEL, lambda device: None)]


def refused() -> list[Check]:
    """A launch that the driver does not take."""
    return [Check("large", KERNEL, _launch_too_many), Check("last", KERNEL, lambda device: None)]


def passing() -> list[Check]:
    return [Check("large", KERNEL, lambda device: None)]


def form(checks: str, table: RecordedTable = CUTEDSL_TABLE) -> NativeForm:
    return NativeForm(table, f"{__name__}:{checks}", lambda device: device.type == "cuda")


def faulty(fault: Callable[..., object]) -> RecordedTable:
    """The CUDA ops with ``fault(tokens, product)`` behind every ``linear`` of a prefill step."""

    def prefill(recording: Recording) -> Ops:
        ops = CUDA_TABLE.prefill(recording)

        def linear(*arguments: Any) -> Tensor:
            y = ops.linear(*arguments)
            recording.call(fault, y)
            return y

        return replace(ops, linear=linear)

    return replace(CUDA_TABLE, prefill=prefill)


def lose_a_column(_: int, y: Tensor) -> None:
    y[:, -1] = 0


def fail(_: int, __: Tensor) -> None:
    raise RuntimeError("CUDA driver error: CUDA_ERROR_INVALID_VALUE at a launch of fake_gemm")


def _spin(device: torch.device) -> None:
    torch.cuda._sleep(_FOREVER)
    torch.cuda.synchronize(device)


def _assert(device: torch.device) -> None:
    outside = torch.tensor([1 << 20], device=device)
    torch.zeros(4, device=device)[outside].cpu()


def _launch_too_many(device: torch.device) -> None:
    recording = Recording(Target.of(device), 1)
    kernel = Kernel(
        "hyper_connection/hyper_connection_post", "hc_post", (("STREAMS", 4), ("COUNT", 8))
    )
    addresses = dict.fromkeys(("y", "streams", "post", "comb", "out"))
    words = {"peers": None, "slot": 0, "rank_words": 0, "exchange": 0, "owner": 0, "tokens": 1}
    comb = {"hc_eps": 0.0, "iterations": 0}
    recording.launch(Shape(kernel, (4, 1), 4096), **addresses, **comb, **words, width=4096)
    Program(recording).run(1)
