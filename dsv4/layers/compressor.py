"""A compressor: two projections of the attention input, pooled into cached rows every ``ratio`` tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressedState, CompressorWeights
from dsv4.quant import QuantTensor


@dataclass(frozen=True)
class Compressor:
    """The main compressor of a CSA or HCA layer, or the indexer's own."""

    ops: Ops
    wkv: QuantTensor
    wgate: QuantTensor
    pooling: CompressorWeights

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: WeightReader,
        ops: Ops,
        ratio: int,
        inv_freq: Tensor,
        compute_dtype: torch.dtype,
        rotate_keys: bool,
    ) -> "Compressor":
        pooling = CompressorWeights(
            ape=weights.tensor("ape"),
            norm=weights.tensor("norm.weight"),
            inv_freq=inv_freq,
            norm_eps=config.rms_norm_eps,
            ratio=ratio,
            rotate_keys=rotate_keys,
            compute_dtype=compute_dtype,
        )
        return cls(ops, weights.matrix("wkv.weight"), weights.matrix("wgate.weight"), pooling)

    def __call__(self, x_TE: Tensor, positions_T: Tensor, state: CompressedState) -> None:
        """Updates ``state`` with the attention input x ``[T, E]``; projections and pooling are float32."""
        kv_TW = self.ops.linear(x_TE, self.wkv, torch.float32)
        score_TW = self.ops.linear(x_TE, self.wgate, torch.float32)
        self.ops.compress(kv_TW, score_TW, positions_T, self.pooling, state)
