"""The attention sublayer: low-rank queries, one shared key-value row, compressor, indexer, grouped output (spec §3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.layers.compressor import PROJECTIONS, Compressor
from dsv4.layers.indexer import Indexer
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.attention import KeySet
from dsv4.ops.compressor import CompressedState
from dsv4.ops.linear import RowList
from dsv4.ops.rope import layer_inv_freq
from dsv4.quant import Weight


@dataclass(frozen=True)
class AttentionState:
    """Caches of one layer: window ring and, by ratio, compressed entries and index keys."""

    keys: KeySet
    compressed: CompressedState | None
    index: CompressedState | None


@dataclass(frozen=True)
class Attention:
    """One layer's attention. ``compressor`` is None for ratio 0, ``indexer`` for every ratio but 4.

    ``input_rows``: wq_a, wkv, then the compressor's projections, the indexer's compressor's and its weights_proj.
    ``query_rows``: wq_b, then the indexer's wq_b.
    """

    ops: Ops
    config: ModelConfig
    inv_freq: Tensor
    input_rows: RowList
    q_norm: Tensor
    query_rows: RowList
    kv_norm: Tensor
    sink_H: Tensor
    wo_a: Weight
    wo_b: Weight
    compressor: Compressor | None
    indexer: Indexer | None

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ops: Ops, ratio: int, compute_dtype: torch.dtype
    ) -> "Attention":
        sink_H = weights.vector("attn_sink")
        inv_freq = layer_inv_freq(config, ratio).to(sink_H.device)
        compressor = indexer = None
        float32_rows: list[str] = []
        queries = ["wq_b.weight"]
        if ratio:
            below = weights.below("compressor")
            compressor = Compressor.build(config, below, ops, ratio, inv_freq, compute_dtype, rotate_keys=False)
            float32_rows += [f"compressor.{name}" for name in PROJECTIONS]
        if ratio == CSA_RATIO:
            indexer = Indexer.build(config, weights.below("indexer"), ops, inv_freq, compute_dtype)
            float32_rows += [f"indexer.compressor.{name}" for name in PROJECTIONS] + ["indexer.weights_proj.weight"]
            queries.append("indexer.wq_b.weight")
        inputs = ["wq_a.weight", "wkv.weight", *float32_rows]
        return cls(
            ops,
            config,
            inv_freq,
            input_rows=weights.row_list(inputs, [None, None, *[torch.float32] * len(float32_rows)]),
            q_norm=weights.vector("q_norm.weight"),
            query_rows=weights.row_list(queries, [None] * len(queries)),
            kv_norm=weights.vector("kv_norm.weight"),
            sink_H=sink_H,
            wo_a=weights.matrix("wo_a.weight"),
            wo_b=weights.matrix("wo_b.weight"),
            compressor=compressor,
            indexer=indexer,
        )

    def __call__(self, x_TE: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
        """x ``[T, E]`` (attn_norm output) at int64 ``positions`` ``[T]`` → ``[T, E]``; updates ``state``."""
        eps = self.config.rms_norm_eps
        low_rank_TR, kv_TD, *compressor_inputs = self.ops.linear_rows(x_TE, self.input_rows)
        q_TN, *index_queries = self.ops.linear_rows(low_rank_TR, self.query_rows, self.q_norm, eps)
        q_THD = q_TN.unflatten(-1, (-1, self.config.head_dim))
        q_THD = self.ops.query_rope(q_THD, positions_T, self.inv_freq, eps)
        self.ops.kv_write(kv_TD, self.kv_norm, positions_T, self.inv_freq, state.keys.ring, eps)
        selected_TK = self._compressed_keys(compressor_inputs, index_queries, positions_T, state)
        o_THD = self.ops.sparse_attention(q_THD, state.keys, selected_TK, self.sink_H, positions_T, self.inv_freq)
        o_TGK = o_THD.flatten(1).unflatten(1, (self.config.o_groups, -1))
        return self.ops.linear(self.ops.grouped_linear(o_TGK, self.wo_a).flatten(1), self.wo_b)

    def _compressed_keys(
        self,
        compressor_inputs: list[Tensor],
        index_queries: list[Tensor],
        positions_T: Tensor,
        state: AttentionState,
    ) -> Tensor | None:
        """Emits compressed entries that these tokens complete; returns the selection of a CSA layer, else None."""
        if self.compressor is None:
            return None
        assert state.compressed is not None
        kv_TW, score_TW, *indexer_inputs = compressor_inputs
        self.compressor(kv_TW, score_TW, positions_T, state.compressed)
        if self.indexer is None:
            return None
        assert state.index is not None
        index_kv_TW, index_score_TW, weight_TI = indexer_inputs
        self.indexer.compressor(index_kv_TW, index_score_TW, positions_T, state.index)
        (index_q_TN,) = index_queries
        return self.indexer(index_q_TN, weight_TI, positions_T, state.index)
