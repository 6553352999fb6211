"""The torch ops on packed weights, with activations rounded where native kernels take them so."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dsv4.ops import TORCH, Ops
from dsv4.ops.immediate import ops_of
from dsv4.ops.linear import RowList
from dsv4.ops.linear.cutedsl.gemm_config import ARCHITECTURES, Rejected
from dsv4.ops.linear.cutedsl.scaled_config import ScaledProblem, scaled_config
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.native import NativeExperts
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.quantize_activations.emulated import EmulatedWeight
from dsv4.ops.router import Router
from dsv4.ops.tables import DirectTable, Table
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, Weight


def emulation(portable: Table) -> DirectTable:
    """``portable`` with torch ops for the products that native kernels round the rows of."""
    ops = ops_of(portable)
    return DirectTable(
        portable.packing,
        replace(
            ops,
            linear=partial(_linear, ops),
            linear_rows=partial(_linear_rows, ops),
            grouped_linear=partial(_grouped_linear, ops),
            moe=partial(_moe, ops),
        ),
    )


def _linear(ops: Ops, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    emulated = _dense(x, weight)
    return (ops if emulated is weight else TORCH).linear(x, emulated, out_dtype)


def _linear_rows(
    ops: Ops,
    x: Tensor,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    if all(_dense(x, weight) is weight for weight in rows.weights):
        return ops.linear_rows(x, rows, norm_weight, norm_eps)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    pairs = zip(rows.weights, rows.out_dtypes, strict=True)
    return tuple(_linear(ops, x, weight, dtype) for weight, dtype in pairs)


def _grouped_linear(ops: Ops, x_TGK: Tensor, weight: Weight) -> Tensor:
    emulated = _dense(x_TGK, weight, x_TGK.shape[1])
    return (ops if emulated is weight else TORCH).grouped_linear(x_TGK, emulated)


def _moe(
    ops: Ops,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
) -> Mixture:
    routed = _experts(x_TE, experts, is_sorted=True)
    common = _experts(x_TE, shared, is_sorted=False)
    same = routed is experts and common is shared
    return (ops if same else TORCH).moe(x_TE, tokens_T, router, routed, common, limit)


def _dense(x: Tensor, weight: Weight, groups: int = 1) -> Weight:
    """The weight, which knows what its native copy multiplies if there is a kernel for it."""
    if not isinstance(weight, PackedWithNative) or weight.native is None:
        return weight
    rows, columns = weight.shape
    problem = ScaledProblem(
        weight.native.format, x.dtype, x.shape[0], rows // groups, columns, groups
    )
    return _multiplying(weight, weight.native.format) if _has_kernel(problem) else weight


def _experts(x_TE: Tensor, experts: ExpertWeights, is_sorted: bool) -> ExpertWeights:
    """The same of experts, of which one is decoded at a time."""
    if not isinstance(experts, NativeExperts) or experts.gate_up is None:
        return experts
    inner, width = experts.gate_up.shape[-2:]
    format = experts.gate_up.format
    first = ScaledProblem(format, None, x_TE.shape[0], inner, width, sorted=is_sorted)
    second = first._replace(out_dtype=torch.float32, features=width, columns=inner)
    if not (_has_kernel(first) and _has_kernel(second)):
        return experts
    w1, w2, w3 = (_multiplying(weight, format) for weight in (experts.w1, experts.w2, experts.w3))
    return ExpertWeights(w1, w2, w3)


def _has_kernel(problem: ScaledProblem) -> bool:
    """Whether there is one on a GPU that these kernels are made for: none of them is particular."""
    return not isinstance(scaled_config(problem, ARCHITECTURES[0], 1), Rejected)


def _multiplying(weight: Weight, format: QuantFormat) -> EmulatedWeight:
    nvfp4 = format is QuantFormat.NVFP4
    return EmulatedWeight(weight, ActivationFormat.NVFP4 if nvfp4 else ActivationFormat.FP8)
