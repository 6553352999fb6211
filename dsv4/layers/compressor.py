"""A compressor: pools two projections of the attention input into cached rows every ``ratio`` tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressedState, CompressorWeights

PROJECTIONS = ("wkv.weight", "wgate.weight")


@dataclass(frozen=True)
class Compressor:
    """The main compressor of a CSA or HCA layer, or the indexer's own. Its projections are rows of the attention
    layer's input list.
    """

    ops: Ops
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
            ape=weights.vector("ape"),
            norm=weights.vector("norm.weight"),
            inv_freq=inv_freq,
            norm_eps=config.rms_norm_eps,
            ratio=ratio,
            rotate_keys=rotate_keys,
            compute_dtype=compute_dtype,
        )
        return cls(ops, pooling)

    def __call__(self, kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, state: CompressedState) -> None:
        """Updates ``state`` with the float32 products of ``PROJECTIONS`` and the attention input, both ``[T, W]``."""
        self.ops.compress(kv_TW, score_TW, positions_T, self.pooling, state)
