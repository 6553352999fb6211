"""Prefill products of quantised activations and native weights on Blackwell's block-scaled tensor
cores.

A weight without native copy, and a product that the kernel does not take, is recorded as
``dsv4.ops.linear.prefill_w16`` does. The compiler is imported and the kernels compiled when a
product is recorded.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.recording import Recording
from dsv4.ops.linear import RowList
from dsv4.ops.linear import prefill_w16 as unscaled
from dsv4.ops.linear.checks import check_grouped, check_linear, check_norm
from dsv4.ops.linear.cutedsl.scaled_config import (
    CTA_TOKENS,
    Rejected,
    ScaledConfig,
    ScaledProblem,
    scaled_config,
)
from dsv4.ops.linear.prefill_cutedsl import INSTALLED, Gemm
from dsv4.ops.linear.prefill_products import normalised
from dsv4.ops.linear.row_list import packed_rows
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.quantize_activations.cuda import SwizzledRows, quantize_rows
from dsv4.weights.native import NativeGateUp, NativeWeight
from dsv4.weights.packed import PackedWeight
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, Weight

# Tensors of ``ScaledGemm`` in the order of its parameters.
_OPERANDS = (
    "rows",
    "row_scale",
    "row_global",
    "weight",
    "weight_scale",
    "weight_global",
    "tiles",
    "tile_count",
    "slots",
    "routing",
    "y",
    "y_scale",
    "y_global",
)


def linear(
    recording: Recording, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``dsv4.ops.linear.linear`` of x bfloat16 ``[T, K]``, quantised as
    ``dsv4.ops.quantize_activations`` says, by a weight with a native copy: bfloat16 or float32
    ``[T, N]``.

    Raises ``ValueError`` as ``dsv4.ops.linear.prefill.linear`` does.
    """
    dtype = out_dtype or torch.bfloat16
    kernels = dense_kernels(recording, check_linear(x, weight, dtype), dtype)
    if kernels is None:
        return unscaled.linear(recording, x, weight, dtype)
    rows = quantize_rows(recording, x, activations_of(kernels.weight))
    return product(recording, kernels, rows, dtype)


def grouped_linear(recording: Recording, x_TGK: Tensor, weight: Weight) -> Tensor:
    """``dsv4.ops.linear.grouped_linear``; the groups of a token are quantised as one row."""
    packed = check_grouped(x_TGK, weight)
    tokens, groups, columns = x_TGK.shape
    kernels = None
    # The groups of a token lie one behind the other, or they are no row.
    if groups == 1 or x_TGK.stride(1) == columns:
        kernels = dense_kernels(recording, packed, torch.bfloat16, groups)
    if kernels is None:
        return unscaled.grouped_linear(recording, x_TGK, weight)
    x = x_TGK.as_strided((tokens, groups * columns), (x_TGK.stride(0), 1))
    rows = quantize_rows(recording, x, activations_of(kernels.weight))
    return product(recording, kernels, rows, torch.bfloat16).unflatten(1, (groups, -1))


def linear_rows(
    recording: Recording,
    x: Tensor,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """``dsv4.ops.linear.linear_rows``: x is quantised once, normed in the same pass, for all
    matrices that take it so.
    """
    packed = packed_rows(rows)
    packed.check(x)
    check_norm(norm_weight, packed.width)
    pairs = list(zip(packed.weights, packed.dtypes, strict=True))
    kernels = [dense_kernels(recording, weight, dtype) for weight, dtype in pairs]
    quantised: dict[ActivationFormat, SwizzledRows] = {}
    if any(found is None for found in kernels):
        x = normalised(recording, x, rows, norm_weight, norm_eps)
        norm_weight = None
    products = []
    for (weight, dtype), found in zip(pairs, kernels, strict=True):
        if found is None:
            products.append(unscaled.linear(recording, x, weight, dtype))
            continue
        format = activations_of(found.weight)
        if format not in quantised:
            quantised[format] = quantize_rows(recording, x, format, norm_weight, norm_eps)
        products.append(product(recording, found, quantised[format], dtype))
    return tuple(products)


@dataclass(frozen=True)
class ScaledKernels:
    """A native weight with its compiled kernels: for up to 128 tokens, for up to 256, and so on."""

    weight: NativeWeight | NativeGateUp
    gemms: tuple[Gemm, ...]

    def operands(self) -> dict[str, Tensor]:
        """The weight by the names of the kernel's parameters, a stack of one if it is none."""
        data = self.weight.data
        if data.dim() == 2:
            data = data.unsqueeze(0)
        return {
            "weight": data,
            "weight_scale": self.weight.block_scale.view(data.shape[0], -1),
            "weight_global": self.weight.global_scale.view(-1),
        }

    def gemm(self, tokens: int) -> Gemm:
        """The kernel for a number of tokens."""
        return self.gemms[min(ceil_div(tokens, CTA_TOKENS), len(self.gemms)) - 1]


def activations_of(weight: NativeWeight | NativeGateUp) -> ActivationFormat:
    """The format of the rows that a native weight multiplies."""
    nvfp4 = weight.format is QuantFormat.NVFP4
    return ActivationFormat.NVFP4 if nvfp4 else ActivationFormat.FP8


def scaled_kernels(
    recording: Recording, weight: NativeWeight | NativeGateUp, problem: ScaledProblem
) -> ScaledKernels | Rejected:
    """The kernels for up to ``problem.tokens`` tokens, compiled where they are not yet, or why
    there are none. Of sorted rows one kernel serves any number.
    """
    if not INSTALLED:
        return Rejected(("nvidia-cutlass-dsl and apache-tvm-ffi are not installed",))
    target = recording.target
    most = round_up(problem.tokens, CTA_TOKENS)
    counts = [most] if problem.sorted else range(CTA_TOKENS, most + 1, CTA_TOKENS)
    configs: list[ScaledConfig] = []
    for tokens in counts:
        of_step = problem._replace(tokens=tokens)
        config = scaled_config(of_step, target.architecture, target.multiprocessors)
        if isinstance(config, Rejected):
            return config
        configs.append(config)
    return ScaledKernels(
        weight, tuple(load_gemm(config, target.architecture) for config in configs)
    )


def load_gemm(config: ScaledConfig, architecture: str) -> Gemm:
    """The compiled kernel of a configuration; its compiler is imported now."""
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.blackwell_scaled import ScaledGemm

    return jit.load(ScaledGemm, config, architecture)


def dense_kernels(
    recording: Recording, weight: PackedWeight, out_dtype: torch.dtype, groups: int = 1
) -> ScaledKernels | None:
    """The kernels of a (block-diagonal) product by a weight of the table; None where it has no
    native copy or no kernel takes it.
    """
    if not isinstance(weight, PackedWithNative) or weight.native is None:
        return None
    rows, columns = weight.shape
    problem = ScaledProblem(
        weight.native.format, out_dtype, recording.tokens, rows // groups, columns, groups
    )
    found = scaled_kernels(recording, weight.native, problem)
    return None if isinstance(found, Rejected) else found


def product(
    recording: Recording, kernels: ScaledKernels, rows: SwizzledRows, out_dtype: torch.dtype
) -> Tensor:
    """Quantised rows of the recording's tokens by a weight ``[N, K]``: ``[T, N]``."""
    y = recording.empty((recording.tokens, kernels.weight.shape[0]), out_dtype)
    record(recording, ScaledCall(kernels), rows, y=y)
    return y


@dataclass(frozen=True)
class ScaledCall:
    """A product as an item of a recording; ``given``: the names of its tensors, in their order."""

    kernels: ScaledKernels
    limit: float = 0.0
    hidden_global: float = 0.0
    given: tuple[str, ...] = ()

    def __call__(self, tokens: int, *tensors: Tensor) -> None:
        """Queues it; sorted rows are counted on the device."""
        operands = dict(zip(self.given, tensors, strict=True))
        if "tiles" not in operands:
            operands["rows"] = operands["rows"][:tokens]
        gemm = self.kernels.gemm(tokens)
        gemm(*map(operands.get, _OPERANDS), self.limit, self.hidden_global)


def record(
    recording: Recording, call: ScaledCall, rows: SwizzledRows, **operands: Tensor | None
) -> None:
    """Notes a product of ``rows``; ``operands``: what it has besides them and the weight, by the
    names of ``ScaledGemm``'s parameters.
    """
    operands |= {"rows": rows.codes, "row_scale": rows.scales, "row_global": rows.global_scale}
    operands |= call.kernels.operands()
    tensors = {name: tensor for name, tensor in operands.items() if tensor is not None}
    recording.call(replace(call, given=tuple(tensors)), *tensors.values())
