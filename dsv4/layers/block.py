"""One layer of the model: attention and MoE."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.attention import Attention
from dsv4.layers.hyper_connection import HyperConnection, Unmixed
from dsv4.layers.moe import MoE
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops


@dataclass(frozen=True)
class Block:
    """Attention and MoE, each between the two seams of its hyper-connection."""

    attn_hc: HyperConnection
    attn: Attention
    ffn_hc: HyperConnection
    ffn: MoE

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: WeightReader,
        ratio: int,
        hashed: bool,
        compute_dtype: torch.dtype,
    ) -> Self:
        """``ratio``: tokens per compressed entry, 0 for none. ``hashed``: the router chooses by
        token id.
        """
        return cls(
            HyperConnection.build(config, weights, "attn"),
            Attention.build(config, weights.below("attn"), ratio, compute_dtype),
            HyperConnection.build(config, weights, "ffn"),
            MoE.build(config, weights.below("ffn"), hashed),
        )

    def mix(self, ops: Ops, unmixed: Unmixed) -> Tensor:
        """The streams ``[T, M, E]`` after the block."""
        return self.ffn_hc.mix(ops, unmixed)
