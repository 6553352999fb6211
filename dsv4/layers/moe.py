"""The feed-forward sublayer: router, routed experts, shared expert. Every layer has one; there are no dense layers."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.moe import ExpertWeights
from dsv4.quant import Weight


@dataclass(frozen=True)
class MoE:
    """``selection``: the bias of a learned router (float32 ``[X]``) or the table of a hash router (int64 ``[V,
    P]``).
    """

    ops: Ops
    config: ModelConfig
    hashed: bool
    gate: Weight
    selection: Tensor
    experts: ExpertWeights
    shared: ExpertWeights

    @classmethod
    def build(cls, config: ModelConfig, weights: WeightReader, ops: Ops, hashed: bool) -> "MoE":
        experts, shared = (
            ExpertWeights(*(weights.matrix(f"{kind}.{w}.weight") for w in ("w1", "w2", "w3")))
            for kind in ("experts", "shared_experts")
        )
        selection = weights.tensor("gate.tid2eid").long() if hashed else weights.vector("gate.bias")
        return cls(ops, config, hashed, weights.matrix("gate.weight"), selection, experts, shared)

    def __call__(self, x_TE: Tensor, tokens_T: Tensor) -> Tensor:
        """x ``[T, E]``, token ids int64 ``[T]`` → ``[T, E]``."""
        scaling = self.config.routed_scaling_factor
        if self.hashed:
            ids_TP, weights_TP = self.ops.route_hash(x_TE, self.gate, self.selection, tokens_T, scaling)
        else:
            per_token = self.config.num_experts_per_tok
            ids_TP, weights_TP = self.ops.route_learned(x_TE, self.gate, self.selection, per_token, scaling)
        return self.ops.moe(x_TE, ids_TP, weights_TP, self.experts, self.shared, self.config.swiglu_limit)
