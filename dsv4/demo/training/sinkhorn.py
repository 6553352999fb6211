"""Sinkhorn normalisation of the mHC combination matrix for training: two Triton kernels instead of
hundreds of launches.
"""

from typing import Any, cast

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK = 64


@triton.jit
def _offsets(n, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, 4)
    matrix = token[:, None, None] * 16 + j[None, :, None] * 4 + j[None, None, :]
    vector = token[:, None] * 4 + j[None, :]
    return matrix, vector, (token < n)[:, None, None], (token < n)[:, None]


@triton.jit
def _softmax(x, eps):
    x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    return x / tl.sum(x, axis=2, keep_dims=True) + eps


@triton.jit
def _forward_kernel(a_ptr, out_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    matrix, vector, inside, _ = _offsets(n, BLOCK)
    x = _softmax(tl.load(a_ptr + matrix, mask=inside, other=0.0), eps)
    x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
        x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    tl.store(out_ptr + matrix, x, mask=inside)


@triton.jit
def _backward_kernel(
    a_ptr, grad_ptr, out_ptr, sums_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
):
    matrix, vector, inside, inside_vector = _offsets(n, BLOCK)
    p = _softmax(tl.load(a_ptr + matrix, mask=inside, other=0.0), eps)
    s = tl.sum(p, axis=1) + eps
    tl.store(sums_ptr + vector, s, mask=inside_vector)
    y = p / s[:, None, :]
    for i in range(ITERATIONS - 1):
        s = tl.sum(y, axis=2) + eps
        tl.store(sums_ptr + (2 * i + 1) * n * 4 + vector, s, mask=inside_vector)
        y = y / s[:, :, None]
        s = tl.sum(y, axis=1) + eps
        tl.store(sums_ptr + (2 * i + 2) * n * 4 + vector, s, mask=inside_vector)
        y = y / s[:, None, :]
    # The sums are read back by other threads of the block than those that wrote them.
    tl.debug_barrier()
    g = tl.load(grad_ptr + matrix, mask=inside, other=0.0)
    for back in range(ITERATIONS - 1):
        i = ITERATIONS - 2 - back
        column = tl.load(sums_ptr + (2 * i + 2) * n * 4 + vector, mask=inside_vector, other=1.0)[
            :, None, :
        ]
        g = (g - tl.sum(g * y, axis=1, keep_dims=True)) / column
        y = y * column
        row = tl.load(sums_ptr + (2 * i + 1) * n * 4 + vector, mask=inside_vector, other=1.0)[
            :, :, None
        ]
        g = (g - tl.sum(g * y, axis=2, keep_dims=True)) / row
        y = y * row
    first = tl.load(sums_ptr + vector, mask=inside_vector, other=1.0)[:, None, :]
    g = (g - tl.sum(g * y, axis=1, keep_dims=True)) / first
    p = p - eps
    g = p * (g - tl.sum(g * p, axis=2, keep_dims=True))
    tl.store(out_ptr + matrix, g, mask=inside)


@torch.library.custom_op("dsv4_demo::sinkhorn", mutates_args=())
def sinkhorn(a: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn of float32 logits ``[..., 4, 4]`` (model.md#sinkhorn) with a gradient."""
    out = torch.empty_like(a)
    n = a.numel() // 16
    cast(Any, _forward_kernel)[(triton.cdiv(n, _BLOCK),)](a, out, n, eps, iterations, _BLOCK)
    return out


@torch.library.custom_op("dsv4_demo::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(a: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of ``sinkhorn`` with respect to its logits."""
    out = torch.empty_like(a)
    n = a.numel() // 16
    sums = torch.empty((2 * iterations - 1) * n * 4, device=a.device)
    cast(Any, _backward_kernel)[(triton.cdiv(n, _BLOCK),)](
        a, grad.contiguous(), out, sums, n, eps, iterations, _BLOCK
    )
    return out


@sinkhorn.register_fake
def _(a: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(a)


@sinkhorn_backward.register_fake
def _(a: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(a)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.iterations = inputs[1]
    ctx.eps = inputs[2]


def _backward(ctx, grad: Tensor):
    return sinkhorn_backward(ctx.saved_tensors[0], grad, ctx.iterations, ctx.eps), None, None


sinkhorn.register_autograd(_backward, setup_context=_setup)
