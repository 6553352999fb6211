"""Prefill linear in CuTe DSL: y = x · Wᵀ on Hopper's wgmma, where ``nvidia-cutlass-dsl`` is installed."""

import importlib.util

import torch
from torch import Tensor

from dsv4.launch import loader
from dsv4.weights.packed import PackedWeight

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("nvidia_cutlass_dsl", "tvm_ffi"))
MAX_DECODE_TOKENS = 8
_OUT_DTYPES = (torch.bfloat16, torch.float32)


def cutedsl_supports(x_TGK: Tensor, weight: PackedWeight) -> bool:
    """Whether ``cutedsl_linear_batches`` takes these: package installed, sm_90, more than 8 tokens, K and the rows of a
    group multiples of 64, rows of x at multiples of 16 bytes.
    """
    tokens, groups, columns = x_TGK.shape
    return (
        INSTALLED
        and tokens > MAX_DECODE_TOKENS
        and len(weight.shape) == 2
        and weight.shape[0] % (64 * groups) == 0
        and columns == weight.shape[1]
        and columns % 64 == 0
        and _aligned(x_TGK)
        and loader.architecture_of(x_TGK.device.index or 0) == "sm_90a"
    )


def cutedsl_linear_batches(x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    """Group g of x bfloat16 ``[T, G, K]`` times rows g·R … g·R + R − 1 of a packed W ``[G·R, K]``: ``[T, G, R]`` in
    bfloat16 or float32. Arguments are those ``cutedsl_supports`` accepts, already checked.
    """
    from dsv4.ops.linear.cutedsl import jit

    (tokens, groups, _), features = x_TGK.shape, weight.shape[0]
    y = torch.empty((tokens, features), dtype=out_dtype, device=x_TGK.device)
    gemm = jit.gemm_for(weight.format, out_dtype, tokens, features, groups, loader.multiprocessors(x_TGK.device))
    block_scale = weight.data if weight.block_scale is None else weight.block_scale
    global_scale = weight.data if weight.global_scale is None else weight.global_scale.view(1)
    gemm(x_TGK, weight.data, block_scale, global_scale, y)
    return y.view(tokens, groups, features // groups)


def cutedsl_prefill_linear(x_TK: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · Wᵀ for x bfloat16 ``[T, K]`` and a packed W ``[N, K]``: ``[T, N]`` in ``out_dtype`` (bfloat16 or float32,
    default bfloat16).

    Products of the bfloat16 activations with the exact weights (NVFP4: before its global scale), float32 accumulation
    in ascending K, one rounding (``tests/ops/linear/test_cutedsl_linear.py``). Raises ``ValueError`` for arguments that
    ``cutedsl_supports`` refuses and ``ImportError`` without ``nvidia-cutlass-dsl``.
    """
    out_dtype = out_dtype or torch.bfloat16
    if x_TK.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x_TK.dtype}, expected torch.bfloat16")
    if out_dtype not in _OUT_DTYPES:
        raise ValueError(f"out_dtype: found {out_dtype}, expected one of {_OUT_DTYPES}")
    x_TGK = x_TK.unsqueeze(1)
    if not _aligned(x_TGK):
        x_TGK = x_TGK.clone(memory_format=torch.contiguous_format)
    if x_TK.dim() != 2 or not cutedsl_supports(x_TGK, weight):
        found = f"{tuple(x_TK.shape)} on {x_TK.device} for a weight {weight.shape}"
        raise ValueError(f"x: found {found}, expected what cutedsl_supports accepts")
    return cutedsl_linear_batches(x_TGK, weight, out_dtype)[:, 0]


def _aligned(x_TGK: Tensor) -> bool:
    return x_TGK.stride(2) == 1 and x_TGK.stride(0) % 8 == x_TGK.stride(1) % 8 == x_TGK.data_ptr() % 16 == 0
