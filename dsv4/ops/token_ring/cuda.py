"""The store of a sampled token on the GPU, into pinned host memory as well."""

import torch
from torch import Tensor

from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording


def store_token(
    recording: Recording,
    token: Tensor,
    position_1: Tensor,
    next_1: Tensor,
    ring_R: Tensor,
    nan_1: Tensor,
) -> None:
    """``dsv4.ops.token_ring.store_token``; ring and ``nan_1`` are on the device of the token or
    pinned.
    """
    expect("token", token, torch.int64, ())
    expect("position_1", position_1, torch.int64, (1,))
    expect("next_1", next_1, torch.int64, (1,))
    expect("nan_1", nan_1, torch.int32, (1,))
    if ring_R.dim() != 1:
        raise ValueError(f"ring_R: found {list(ring_R.shape)}, expected [R]")
    slots = ring_R.shape[0]
    expect("ring_R", ring_R, torch.int64, (slots,))
    recording.launch(
        Shape(Kernel("token_ring/token_ring", "store_token"), 1, 32),
        token=token,
        position=position_1,
        next=next_1,
        ring=ring_R,
        nan=nan_1,
        slots=slots,
    )
