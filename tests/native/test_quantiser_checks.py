"""The checks of quantisers: on a CPU with the torch ones in the place of kernels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.native import quantiser_checks
from dsv4.native.quantiser_checks import quantiser_checks as checks_of
from dsv4.ops.quantize_activations import ActivationFormat, quantize_rows
from tests.ops.quantize_activations.values import swizzled

CPU = torch.device("cpu")


def run_checks(
    monkeypatch: pytest.MonkeyPatch, format: ActivationFormat, fault: Callable[[list[Tensor]], Any]
) -> list[str | None]:
    """What the checks of ``format`` find of kernels that write what torch does, and then have the
    fault.
    """
    given: list[float | None] = []

    def record(
        recording: object, x: Tensor, format: ActivationFormat, global_scale: float | None
    ) -> SimpleNamespace:
        given.append(global_scale)
        return SimpleNamespace(codes=x, scales=x, global_scale=x)

    def immediately(op: Callable[..., Any]) -> Callable[[Tensor], list[Tensor]]:
        def run(x: Tensor) -> list[Tensor]:
            op(None, x)
            rows = swizzled(quantize_rows(x, format, given[-1]))
            found = [part.clone() for part in rows if part is not None]
            fault(found)
            return found

        return run

    monkeypatch.setattr(quantiser_checks.cuda, "quantize_rows", record)
    monkeypatch.setattr(quantiser_checks, "immediately", immediately)
    monkeypatch.setattr(quantiser_checks, "SHAPES", ((130, 320),))
    return [check.run(CPU) for check in checks_of(format)]


@pytest.mark.parametrize(("format", "count"), [("fp8", 2), ("nvfp4", 4)])
def test_equal_bytes_pass(monkeypatch: pytest.MonkeyPatch, format: str, count: int) -> None:
    found = run_checks(monkeypatch, ActivationFormat(format), lambda parts: None)
    assert found == [None] * count


def one_bit(part: int) -> Callable[[list[Tensor]], None]:
    def fault(parts: list[Tensor]) -> None:
        parts[part].view(torch.uint8).view(-1)[7] ^= 1

    return fault


@pytest.mark.parametrize(("part", "name"), [*enumerate(["codes", "scales", "global scales"])])
def test_one_bit_fails(monkeypatch: pytest.MonkeyPatch, part: int, name: str) -> None:
    found = run_checks(monkeypatch, ActivationFormat.NVFP4, one_bit(part))
    assert {str(wrong).partition(" of ")[0] for wrong in found} == {f"{name}: 1"}
