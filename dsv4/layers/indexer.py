"""Lightning indexer of a CSA layer: its own compressor and queries choose the compressed entries attention reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.layers.compressor import Compressor
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressedState


@dataclass(frozen=True)
class Indexer:
    """Queries come from c_q (the q_norm output), head weights from x, keys from its own compressor (spec §4.3)."""

    ops: Ops
    config: ModelConfig
    compressor: Compressor

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ops: Ops, inv_freq: Tensor, compute_dtype: torch.dtype
    ) -> "Indexer":
        compressor = Compressor.build(
            config, weights.below("compressor"), ops, CSA_RATIO, inv_freq, compute_dtype, rotate_keys=True
        )
        return cls(ops, config, compressor)

    def __call__(self, q_TN: Tensor, weight_TI: Tensor, positions_T: Tensor, state: CompressedState) -> Tensor:
        """Selects int64 ``[T, K]`` compressed entries, −1 for none, among the index keys stored so far.

        q ``[T, I·D]`` = wq_b · c_q in the compute dtype, weight float32 ``[T, I]`` = weights_proj · x.
        """
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q_TID = q_TN.unflatten(-1, (heads, width))
        q_TID = self.ops.index_query(q_TID, positions_T, self.compressor.pooling.inv_freq)
        score_scale = width**-0.5 * heads**-0.5
        return self.ops.index_select(q_TID, weight_TI, score_scale, state.rows, positions_T, self.config.index_topk)
