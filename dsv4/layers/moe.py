"""The feed-forward sublayer: router, routed experts, shared expert. Every layer has one; there are
no dense layers.
"""

from dataclasses import dataclass

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.router import Router


@dataclass(frozen=True)
class MoE:
    """Weights of the layer; ``swiglu_limit`` clamps all experts."""

    router: Router
    experts: ExpertWeights
    shared: ExpertWeights
    swiglu_limit: float

    @classmethod
    def build(cls, config: ModelConfig, weights: WeightReader, hashed: bool) -> "MoE":
        experts, shared = (weights.experts(kind) for kind in ("experts", "shared_experts"))
        selection = (
            weights.tensor("gate.tid2eid").long().contiguous()
            if hashed
            else weights.vector("gate.bias")
        )
        gate = weights.matrix("gate.weight")
        per_token = config.num_experts_per_tok
        router = Router(gate, selection, hashed, per_token, config.routed_scaling_factor)
        return cls(router, experts, shared, config.swiglu_limit)

    def __call__(self, ops: Ops, x_TE: Tensor, tokens_T: Tensor) -> Mixture:
        """x ``[T, E]``, token ids int64 ``[T]`` → ``[T, E]`` and the routes."""
        return ops.moe(x_TE, tokens_T, self.router, self.experts, self.shared, self.swiglu_limit)
