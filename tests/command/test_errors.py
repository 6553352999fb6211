"""Errors of a device as one line."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.command.errors import MAX_MESSAGE, device_error_types, device_message, user_message


def test_what_a_device_said_first_is_told() -> None:
    """Behind that every call fails, those that clean up too."""
    named = RuntimeError("CUDA error: words of cuda:0 did not come")
    named.__context__ = torch.AcceleratorError("CUDA error: unspecified launch failure")
    behind = torch.AcceleratorError("CUDA error: unspecified launch failure")
    behind.__context__ = named
    assert device_message(behind) == "CUDA: words of cuda:0 did not come"


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY: x", "can't allocate memory"]
)
def test_memory_that_runs_out_has_one_name_whoever_says_so(text: str) -> None:
    assert device_message(RuntimeError(text)) == "memory: ran out of memory"


def test_an_error_of_cuda_core_is_its_first_sentence() -> None:
    """Its class is no RuntimeError, and its messages have no prefix."""
    error = OSError("CUDA_ERROR_ILLEGAL_ADDRESS: a load failed. The context\ncannot be used.")
    assert device_message(error) == "CUDA: CUDA_ERROR_ILLEGAL_ADDRESS: a load failed"


def test_an_error_of_the_device_needs_no_prefix_where_torch_has_a_class_for_it() -> None:
    assert device_message(torch.AcceleratorError("launch failed\nadvice")) == "CUDA: launch failed"
    assert device_message(RuntimeError("launch failed")) is None


def test_a_long_message_of_a_device_is_cut() -> None:
    assert device_message(RuntimeError("CUDA error: " + "x" * MAX_MESSAGE)) == (
        "CUDA: " + "x" * MAX_MESSAGE
    )
    found = device_message(RuntimeError("CUDA error: " + "x" * (MAX_MESSAGE + 1)))
    assert found == "CUDA: " + "x" * (MAX_MESSAGE - 3) + "..."


def test_an_error_of_the_system_without_a_reason_is_its_text() -> None:
    assert user_message(OSError("the file\nis cut off")) == "the file is cut off"


def test_errors_of_cuda_core_are_those_of_a_device_once_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "cuda.core._utils.cuda_utils"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert device_error_types() == (RuntimeError, MemoryError)
    imported: Any = SimpleNamespace(CUDAError=LookupError)
    monkeypatch.setitem(sys.modules, module, imported)
    assert device_error_types() == (RuntimeError, MemoryError, LookupError)


def test_an_error_of_a_device_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch aborts the process while it cleans up."""
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    error = RuntimeError("CUDA error: x")
    device_message(error)
    assert sys.last_value is error
