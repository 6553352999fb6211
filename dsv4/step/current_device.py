"""The device that launches and allocations of a block of code go to."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
