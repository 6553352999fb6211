"""The attention sublayer: low-rank queries, one shared key-value row, compressor, indexer, grouped output (spec §3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.layers.compressor import Compressor
from dsv4.layers.indexer import Indexer
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.attention import KeySet
from dsv4.ops.compressor import CompressedState
from dsv4.ops.rope import layer_inv_freq
from dsv4.quant import QuantTensor


@dataclass(frozen=True)
class AttentionState:
    """Caches of one layer: window ring and, by ratio, compressed entries and index keys."""

    keys: KeySet
    compressed: CompressedState | None
    index: CompressedState | None


@dataclass(frozen=True)
class Attention:
    """One layer's attention. ``compressor`` is None for ratio 0, ``indexer`` for every ratio but 4."""

    ops: Ops
    config: ModelConfig
    inv_freq: Tensor
    wq_a: QuantTensor
    q_norm: Tensor
    wq_b: QuantTensor
    wkv: QuantTensor
    kv_norm: Tensor
    sink_H: Tensor
    wo_a: QuantTensor
    wo_b: QuantTensor
    compressor: Compressor | None
    indexer: Indexer | None

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ops: Ops, ratio: int, compute_dtype: torch.dtype
    ) -> "Attention":
        sink_H = weights.tensor("attn_sink")
        inv_freq = layer_inv_freq(config, ratio).to(sink_H.device)
        compressor = indexer = None
        if ratio:
            below = weights.below("compressor")
            compressor = Compressor.build(config, below, ops, ratio, inv_freq, compute_dtype, rotate_keys=False)
        if ratio == CSA_RATIO:
            indexer = Indexer.build(config, weights.below("indexer"), ops, inv_freq, compute_dtype)
        return cls(
            ops,
            config,
            inv_freq,
            wq_a=weights.matrix("wq_a.weight"),
            q_norm=weights.tensor("q_norm.weight"),
            wq_b=weights.matrix("wq_b.weight"),
            wkv=weights.matrix("wkv.weight"),
            kv_norm=weights.tensor("kv_norm.weight"),
            sink_H=sink_H,
            wo_a=weights.matrix("wo_a.weight"),
            wo_b=weights.matrix("wo_b.weight"),
            compressor=compressor,
            indexer=indexer,
        )

    def __call__(self, x_TE: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
        """x ``[T, E]`` (attn_norm output) at int64 ``positions`` ``[T]`` → ``[T, E]``; updates ``state``."""
        eps = self.config.rms_norm_eps
        c_q_TR = self.ops.rms_norm(self.ops.linear(x_TE, self.wq_a), self.q_norm, eps)
        self.ops.kv_write(
            self.ops.linear(x_TE, self.wkv), self.kv_norm, positions_T, self.inv_freq, state.keys.ring, eps
        )
        selected_TK = self._compressed_keys(x_TE, c_q_TR, positions_T, state)
        o_THD = self.ops.sparse_attention(
            self._queries(c_q_TR, positions_T), state.keys, selected_TK, self.sink_H, positions_T, self.inv_freq
        )
        o_TGK = o_THD.flatten(1).unflatten(1, (self.config.o_groups, -1))
        return self.ops.linear(self.ops.grouped_linear(o_TGK, self.wo_a).flatten(1), self.wo_b)

    def _queries(self, c_q_TR: Tensor, positions_T: Tensor) -> Tensor:
        q_THD = self.ops.linear(c_q_TR, self.wq_b).unflatten(-1, (-1, self.config.head_dim))
        return self.ops.rope(self.ops.rms_norm(q_THD, None, self.config.rms_norm_eps), positions_T, self.inv_freq)

    def _compressed_keys(
        self, x_TE: Tensor, c_q_TR: Tensor, positions_T: Tensor, state: AttentionState
    ) -> Tensor | None:
        """Emits compressed entries that these tokens complete; returns the selection of a CSA layer, else None."""
        if self.compressor is None:
            return None
        assert state.compressed is not None
        self.compressor(x_TE, positions_T, state.compressed)
        if self.indexer is None:
            return None
        assert state.index is not None
        return self.indexer(x_TE, c_q_TR, positions_T, state.index)
