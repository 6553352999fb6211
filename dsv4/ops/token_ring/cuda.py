"""The store of a sampled token on the GPU, into pinned host memory as well."""

import torch
from torch import Tensor

from dsv4.launch.loader import launch
from dsv4.ops.attention.decode import expect


def store_token(token: Tensor, position_1: Tensor, next_1: Tensor, ring_R: Tensor) -> None:
    """``dsv4.ops.token_ring.store_token``; the ring is on the device of the token or pinned."""
    device = token.device
    expect("token", token, torch.int64, (), device)
    expect("position_1", position_1, torch.int64, (1,), device)
    expect("next_1", next_1, torch.int64, (1,), device)
    if ring_R.dtype != torch.int64 or ring_R.dim() != 1 or not (ring_R.device == device or ring_R.is_pinned()):
        found = f"{ring_R.dtype} {list(ring_R.shape)} on {ring_R.device}"
        raise ValueError(f"ring_R: found {found}, expected torch.int64 [R] on {device} or pinned")
    tensors = (token, position_1, next_1, ring_R)
    launch("token_ring", "store_token", 1, 32, *tensors, ring_R.shape[0], device=device)
