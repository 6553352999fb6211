"""Errors of a device as one line."""

import torch

from dsv4.command.errors import device_message


def test_what_a_device_said_first_is_told() -> None:
    """Behind that every call fails, those that clean up too."""
    named = RuntimeError("CUDA error: words of cuda:0 did not come")
    named.__context__ = torch.AcceleratorError("CUDA error: unspecified launch failure")
    behind = torch.AcceleratorError("CUDA error: unspecified launch failure")
    behind.__context__ = named
    assert device_message(behind) == "CUDA: words of cuda:0 did not come"
