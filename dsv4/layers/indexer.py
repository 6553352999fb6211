"""Lightning indexer of a CSA layer: its own compressor and queries choose the compressed entries attention reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.layers.compressor import Compressor
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressedState
from dsv4.quant import QuantTensor


@dataclass(frozen=True)
class Indexer:
    """Queries come from c_q (the q_norm output), head weights from x, keys from its own compressor (spec §4.3)."""

    ops: Ops
    config: ModelConfig
    wq_b: QuantTensor
    weights_proj: QuantTensor
    compressor: Compressor

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ops: Ops, inv_freq: Tensor, compute_dtype: torch.dtype
    ) -> "Indexer":
        compressor = Compressor.build(
            config, weights.below("compressor"), ops, CSA_RATIO, inv_freq, compute_dtype, rotate_keys=True
        )
        return cls(ops, config, weights.matrix("wq_b.weight"), weights.matrix("weights_proj.weight"), compressor)

    def __call__(self, x_TE: Tensor, c_q_TR: Tensor, positions_T: Tensor, state: CompressedState) -> Tensor:
        """Stores the new index keys, then selects: int64 ``[T, K]`` compressed entries, −1 for none."""
        self.compressor(x_TE, positions_T, state)
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q_TID = self.ops.linear(c_q_TR, self.wq_b).unflatten(-1, (heads, width))
        q_TID = self.ops.index_query(q_TID, positions_T, self.compressor.pooling.inv_freq)
        weight_TI = self.ops.linear(x_TE, self.weights_proj, torch.float32) * (width**-0.5 * heads**-0.5)
        return self.ops.index_select(q_TID, weight_TI, state.rows, positions_T, self.config.index_topk)
