"""The torch ops on packed weights, with activations rounded where a native copy takes them so."""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.ops import TORCH, TORCH_PACKING
from dsv4.ops.linear import RowList
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.native import NativeExperts
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.quantize_activations.emulated import EmulatedWeight
from dsv4.ops.router import Router
from dsv4.ops.tables import DirectTable
from dsv4.weights.native import NativeGateUp, NativeWeight
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, Weight


def _linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    return TORCH.linear(x, _emulated(weight), out_dtype)


def _linear_rows(
    x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> tuple[Tensor, ...]:
    emulated = RowList(tuple(map(_emulated, rows.weights)), rows.out_dtypes)
    return TORCH.linear_rows(x, emulated, norm_weight, norm_eps)


def _grouped_linear(x_TGK: Tensor, weight: Weight) -> Tensor:
    return TORCH.grouped_linear(x_TGK, _emulated(weight))


def _moe(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
) -> Mixture:
    routed = _emulated_experts(experts)
    return TORCH.moe(x_TE, tokens_T, router, routed, _emulated_experts(shared), limit)


def _emulated(weight: Weight) -> Weight:
    """The weight, which knows what its native copy multiplies. Of a stack one matrix is decoded at
    a time.
    """
    if isinstance(weight, PackedWithNative):
        return _multiplying(weight, weight.native)
    return weight


def _emulated_experts(experts: ExpertWeights) -> ExpertWeights:
    if not isinstance(experts, NativeExperts):
        return ExpertWeights(*map(_emulated, (experts.w1, experts.w2, experts.w3)))
    w1, w3 = (_multiplying(weight, experts.gate_up) for weight in (experts.w1, experts.w3))
    return ExpertWeights(w1, _emulated(experts.w2), w3)


def _multiplying(weight: Weight, native: NativeWeight | NativeGateUp | None) -> Weight:
    if native is None:
        return weight
    nvfp4 = native.format is QuantFormat.NVFP4
    return EmulatedWeight(weight, ActivationFormat.NVFP4 if nvfp4 else ActivationFormat.FP8)


EMULATION = DirectTable(
    TORCH_PACKING,
    replace(
        TORCH,
        linear=_linear,
        linear_rows=_linear_rows,
        grouped_linear=_grouped_linear,
        moe=_moe,
    ),
)
