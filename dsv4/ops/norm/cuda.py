"""RMS normalisation on the GPU: one block per row."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens

# Columns of one 16-byte access.
_VECTOR = 8
_MAX_THREADS = 1024


def rms_norm(recording: Recording, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``dsv4.ops.norm.rms_norm`` for contiguous bfloat16 x ``[T, ..., D]``; float32 inside, one
    rounding.

    ``weight``: float32 ``[D]`` or None. Where T is the recording's number of tokens, fewer tokens
    are fewer rows. Raises ``ValueError`` for another dtype, shape or layout.
    """
    width = x.shape[-1]
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    expect("x", x, torch.bfloat16, tuple(x.shape))
    if weight is not None:
        expect("weight", weight, torch.float32, (width,))
    aligned = is_aligned(x, 16) and (weight is None or is_aligned(weight, 16))
    count = _VECTOR if width % _VECTOR == 0 and aligned else 1
    accesses = width // count
    threads = min(round_up(accesses, 32), _MAX_THREADS)
    defines = (("COUNT", count), ("GROUPS", ceil_div(accesses, threads)))
    kernel = Kernel("norm/rms_norm", "rms_norm", defines)
    y = recording.empty_like(x)
    rows = x.numel() // width
    per_token = rows // x.shape[0]
    by_token = x.shape[0] == recording.tokens
    recording.launch(
        by_tokens(_shape, kernel, per_token, threads) if by_token else Shape(kernel, rows, threads),
        x=x,
        weight=weight,
        y=y,
        width=width,
        eps=eps,
    )
    return y


def _shape(kernel: Kernel, per_token: int, threads: int, tokens: int) -> Shape:
    return Shape(kernel, tokens * per_token, threads)
