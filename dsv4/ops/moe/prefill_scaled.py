"""``dsv4.ops.moe.prefill`` with quantised activations: sorted rows are quantised, gate and up write
quantised hidden rows, and down multiplies these.

Experts without native copies, or that the kernels do not take, are recorded as
``dsv4.ops.moe.prefill_w16`` does: routed and shared ones apart.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.linear import prefill_w16 as linear_w16
from dsv4.ops.linear.cutedsl.scaled_config import Rejected, ScaledProblem
from dsv4.ops.linear.prefill_scaled import (
    ScaledCall,
    ScaledKernels,
    activations_of,
    product,
    record,
    scaled_kernels,
)
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.native import NativeExperts
from dsv4.ops.moe.operands import Layer
from dsv4.ops.moe.prefill import Routed, combine, moe_with
from dsv4.ops.moe.prefill_w16 import down, gate_up
from dsv4.ops.moe.sorted_pairs import Sorted, sort_by_expert
from dsv4.ops.quantize_activations import ActivationFormat, hidden_global_scale
from dsv4.ops.quantize_activations.cuda import (
    SwizzledRows,
    quantize_rows,
    quantize_sorted_rows,
)
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight
from dsv4.weights.packed_native import PackedWithNative


def moe(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Mixture:
    """``dsv4.ops.moe.moe`` for bfloat16 x ``[T, E]`` of many tokens; hidden rows are rounded to
    bfloat16 first, then quantised.

    Raises ``ValueError`` as ``dsv4.ops.moe.prefill.moe`` does.
    """
    layer = Layer(experts, shared, float(limit))
    sum_part = partial(_sum_part, router.scaling)
    return moe_with(linear_w16.linear, recording, x_TE, tokens_T, router, layer, sum_part)


def _sum_part(
    largest_weight: float, recording: Recording, routed: Routed, layer: Layer, y_TE: Tensor
) -> None:
    """The experts of some tokens; no routing weight is above ``largest_weight``."""
    pairs = sort_by_expert(recording, routed.ids_TP, layer.experts.w1.shape[0])
    products = _routed_products(largest_weight, recording, routed, layer, pairs)
    shared_product = _shared_product(recording, routed.x_TE, layer)
    combine(recording, shared_product, products, routed.ids_TP, pairs, y_TE)


def _routed_products(
    largest_weight: float, recording: Recording, routed: Routed, layer: Layer, pairs: Sorted
) -> Tensor:
    """w2 · hidden of every pair: float32 ``[T·P, E]`` in the order of ids."""
    experts = layer.experts
    x_TE = routed.x_TE
    weights_TP = routed.weights_TP
    kernels = _Kernels.of(recording, experts, is_sorted=True)
    if kernels is None:
        hidden = gate_up(recording, x_TE, experts.w1, experts.w3, layer.limit, pairs, weights_TP)
        return down(recording, hidden, experts.w2, pairs)
    rows = quantize_sorted_rows(recording, x_TE, pairs, kernels.format)
    hidden = kernels.empty_hidden(recording, rows.codes.shape[0])
    hidden_global = hidden_global_scale(layer.limit, largest_weight)
    gated = ScaledCall(kernels.gate_up, layer.limit, hidden_global)
    results = _results(hidden)
    record(recording, gated, rows, **pairs.arguments, **results, routing=weights_TP.flatten())
    products = recording.empty((pairs.slots.shape[0], x_TE.shape[1]), torch.float32)
    record(recording, ScaledCall(kernels.down), hidden, **pairs.arguments, y=products)
    return products


def _shared_product(recording: Recording, x_TE: Tensor, layer: Layer) -> Tensor:
    """w2 · hidden of the shared expert: float32 ``[T, E]``."""
    shared = layer.shared
    kernels = _Kernels.of(recording, shared, is_sorted=False)
    if kernels is None:
        hidden = gate_up(recording, x_TE, shared.w1, shared.w3, layer.limit)
        return linear_w16.linear(recording, hidden, shared.w2, torch.float32)
    rows = quantize_rows(recording, x_TE, kernels.format)
    hidden = kernels.empty_hidden(recording, recording.tokens)
    hidden_global = hidden_global_scale(layer.limit, 1.0)
    gated = ScaledCall(kernels.gate_up, layer.limit, hidden_global)
    record(recording, gated, rows, **_results(hidden))
    return product(recording, kernels.down, hidden, torch.float32)


@dataclass(frozen=True)
class _Kernels:
    """Those of gate and up, and of down."""

    gate_up: ScaledKernels
    down: ScaledKernels

    @classmethod
    def of(
        cls, recording: Recording, experts: ExpertWeights[PackedWeight], is_sorted: bool
    ) -> "_Kernels | None":
        """None where the experts have no native copies or no kernel takes them."""
        if not isinstance(experts, NativeExperts) or experts.gate_up is None:
            return None
        assert isinstance(experts.w2, PackedWithNative)
        w2 = experts.w2.native
        assert w2 is not None
        inner, width = experts.gate_up.shape[-2:]
        first = ScaledProblem(w2.format, None, recording.tokens, inner, width, sorted=is_sorted)
        gate_up = scaled_kernels(recording, experts.gate_up, first)
        second = first._replace(out_dtype=torch.float32, features=width, columns=inner)
        down = scaled_kernels(recording, w2, second)
        if isinstance(gate_up, Rejected) or isinstance(down, Rejected):
            return None
        return cls(gate_up, down)

    @property
    def format(self) -> ActivationFormat:
        """Of the rows of both products."""
        return activations_of(self.down.weight)

    def empty_hidden(self, recording: Recording, rows: int) -> SwizzledRows:
        """Buffers for hidden rows."""
        return SwizzledRows.empty(recording, rows, self.down.weight.shape[-1], self.format)


def _results(hidden: SwizzledRows) -> dict[str, Tensor | None]:
    """Hidden rows by the names of the kernel's results."""
    return {"y": hidden.codes, "y_scale": hidden.scales, "y_global": hidden.global_scale}
