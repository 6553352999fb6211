"""``dsv4.ops.moe.prefill`` with the gate's and the shared w2's product by the CuTe DSL kernel."""

from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.linear.prefill_cutedsl import linear
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.operands import Layer
from dsv4.ops.moe.prefill import moe_with
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight


def moe(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Mixture:
    """``dsv4.ops.moe.prefill.moe`` by ``dsv4.ops.linear.prefill_cutedsl.linear``."""
    layer = Layer(experts, shared, float(limit))
    return moe_with(linear, recording, x_TE, tokens_T, router, layer)
