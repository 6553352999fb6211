"""Prefill products in CuTe DSL, from 128 tokens on and where they fit: wgmma on Hopper
(``nvidia-cutlass-dsl``).

Its compiler is imported and the kernels compiled when a product is recorded. What it does not take
is recorded as ``dsv4.ops.linear.prefill_long`` does.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.recording import Recording
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.prefill import linear_batches
from dsv4.ops.linear.prefill_long import linear_batches_long
from dsv4.ops.linear.prefill_products import PrefillProducts
from dsv4.weights.packed import PackedWeight

_PACKAGES = ("nvidia_cutlass_dsl", "tvm_ffi")
INSTALLED = all(importlib.util.find_spec(name) is not None for name in _PACKAGES)
# From here on it is faster (docs/kernels/linear.md); for fewer tokens the split over K of the
# other form wins.
CUTEDSL_TOKENS = 128
# Numbers of tokens that are equal in units of this have the same kernel.
_TOKEN_STEP = 16
# K and the rows of a group are multiples of this: the columns and rows of a wgmma tile.
_MULTIPLE = 64

Gemm = Callable[..., object]


def cutedsl_supports(recording: Recording, x_TGK: Tensor, weight: PackedWeight) -> bool:
    """Whether long steps of this recording take the CuTe DSL product for these operands."""
    _, groups, columns = x_TGK.shape
    return (
        INSTALLED
        and recording.target.architecture == "sm_90a"
        and recording.tokens >= CUTEDSL_TOKENS
        and weight.shape[0] % (_MULTIPLE * groups) == 0
        and columns % _MULTIPLE == 0
        and x_TGK.stride(0) % 8 == x_TGK.stride(1) % 8 == 0
    )


def gemms_for(
    recording: Recording, weight: PackedWeight, groups: int, out_dtype: torch.dtype
) -> tuple[Gemm, ...]:
    """The compiled kernels for 128, 144, 160, … tokens up to those of the recording."""
    from dsv4.ops.linear.cutedsl import jit

    most = round_up(recording.tokens, _TOKEN_STEP)
    counts = range(CUTEDSL_TOKENS, most + 1, _TOKEN_STEP)
    features = weight.shape[0]
    multiprocessors = recording.target.multiprocessors
    fixed = (features, groups, multiprocessors)
    return tuple([jit.gemm_for(weight.format, out_dtype, tokens, *fixed) for tokens in counts])


def gemm_operands(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Data, block scales and global scale as the kernels take them; formats without scales ignore
    those.
    """
    block_scale = weight.data if weight.block_scale is None else weight.block_scale
    global_scale = weight.data if weight.global_scale is None else weight.global_scale.view(1)
    return weight.data, block_scale, global_scale


def _linear_batches(
    recording: Recording, x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype
) -> Tensor:
    x_TGK = aligned_rows(recording, x_TGK)
    if not cutedsl_supports(recording, x_TGK, weight):
        return linear_batches_long(recording, x_TGK, weight, out_dtype)
    y_TGR = linear_batches(recording, x_TGK, weight, out_dtype, fewer_than=CUTEDSL_TOKENS)
    product = _LongProduct(gemms_for(recording, weight, x_TGK.shape[1], out_dtype))
    recording.call(product, x_TGK, *gemm_operands(weight), y_TGR.flatten(1))
    return y_TGR


@dataclass(frozen=True)
class _LongProduct:
    """``gemms``: for 128 tokens and 16 more each. Fewer tokens are left to another launch."""

    gemms: tuple[Gemm, ...]

    def __call__(self, tokens: int, x_TGK: Tensor, *operands: Tensor) -> None:
        """``operands``: data and both scales of the weight, and the result ``[T, N]``."""
        if tokens < CUTEDSL_TOKENS:
            return
        *weight, y = operands
        gemm = self.gemms[ceil_div(tokens - CUTEDSL_TOKENS, _TOKEN_STEP)]
        gemm(x_TGK[:tokens], *weight, y[:tokens])


_PRODUCTS = PrefillProducts(_linear_batches)
linear = _PRODUCTS.linear
grouped_linear = _PRODUCTS.grouped_linear
linear_rows = _PRODUCTS.linear_rows
