"""The choice between native and portable kernels, verdict by verdict."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.errors import UserError
from dsv4.native import form as native_form
from dsv4.native.check import Result, Verdict
from dsv4.native.form import NativeForm, native_or_portable
from dsv4.ops.tables import (
    CUDA_TABLE,
    CUTEDSL_TABLE,
    TORCH_TABLE,
    RecordedTable,
    Table,
    swap_ops,
)
from tests.native.fakes import form

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]
PASSED = Verdict((Result("small", "gemm", "passed"),))
FAILED = Verdict((Result("small", "gemm", "failed", "12 values are wrong"),))


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Sets the verdict of every model of GPU; returns the models that were asked about."""

    def of(**models: Verdict) -> list[str]:
        asked: list[str] = []

        def verdict(checks: str, device: torch.device) -> Verdict:
            name = native_form._name(device)
            asked.append(name)
            return models[name]

        monkeypatch.setattr(native_form, "verdict_for", verdict)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "ABB"[device.index])
        return asked

    return of


def choose(chosen: NativeForm | None, devices: list[torch.device], required: bool = False) -> Table:
    return native_or_portable(chosen, TORCH_TABLE, devices, required)


def test_a_passed_verdict_takes_native(verdicts: Callable[..., list[str]]) -> None:
    verdicts(cpu=PASSED)
    native = form()
    table = choose(native, [CPU])
    assert table.portable is TORCH_TABLE
    assert table.refused is None
    assert table.packing == native.table.packing
    assert table != TORCH_TABLE


def test_anything_else_takes_portable_and_says_why(verdicts: Callable[..., list[str]]) -> None:
    verdicts(cpu=FAILED)
    table = choose(form(), [CPU])
    assert table.portable is None
    assert table.refused == "gemm (small): 12 values are wrong"
    with pytest.raises(UserError, match=r"^EngineConfig.require_native: gemm \(small\): 12 values"):
        choose(form(), [CPU], required=True)


def test_every_model_of_gpu_has_to_pass_once(verdicts: Callable[..., list[str]]) -> None:
    native = NativeForm(form().table, "m:f", lambda device: device.type == "cuda")
    asked = verdicts(A=PASSED, B=PASSED)
    assert choose(native, GPUS).portable is TORCH_TABLE
    assert asked == ["A", "B"]
    verdicts(A=PASSED, B=FAILED)
    assert choose(native, GPUS).refused is not None


def test_swapped_ops_are_swapped_in_the_portable_table_too() -> None:
    swapped = swap_ops(replace(CUTEDSL_TABLE, portable=CUDA_TABLE), {"moe": "torch"})
    assert isinstance(swapped.portable, RecordedTable)
    assert swapped.portable.exact
    assert swapped.portable.prefill is not CUDA_TABLE.prefill


@pytest.mark.parametrize("made", [False, True])
def test_other_gpus_have_portable_kernels_without_a_word(
    verdicts: Callable[..., list[str]], made: bool
) -> None:
    asked = verdicts()
    native = NativeForm(form().table, "m:f", lambda device: device.index == 0) if made else None
    assert choose(native, GPUS) is TORCH_TABLE
    assert asked == []
    with pytest.raises(UserError, match="^EngineConfig.require_native: found A, B, expected GPUs"):
        choose(native, GPUS, required=True)
