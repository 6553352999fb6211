"""Checks of the tensors that launchers get: one line that names the tensor, what was found and what
was expected.
"""

import torch
from torch import Tensor


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless ``tensor`` is contiguous and of this dtype and shape."""
    expect_rows(name, tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: found strides {tensor.stride()}, expected contiguous")


def expect_rows(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless ``tensor`` has this dtype and shape and a last dimension without
    gaps.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {list(shape)}")
    if tensor.numel() and tensor.dim() and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: found strides {tensor.stride()}, expected rows without gaps")
