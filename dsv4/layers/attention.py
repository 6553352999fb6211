"""The attention sublayer: projections, window keys, compressor, indexer, output
(model.md#attention).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import AttentionState
from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.layers.compressor import PROJECTIONS, compressor_weights
from dsv4.layers.indexer import Indexer, Selection
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.linear import RowList
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.rope import layer_inv_freq
from dsv4.weights.quant import Weight


class Projections(NamedTuple):
    """The projections of attention's input: queries ``[T, H·D]``, key-value row ``[T, D]``, and by
    ratio the compressors' products (float32, in the order of ``Attention.input_rows``) and the
    indexer's queries.
    """

    q_TN: Tensor
    kv_TD: Tensor
    compressor_inputs: tuple[Tensor, ...]
    index_queries: tuple[Tensor, ...]


class Attended(NamedTuple):
    """The sublayer's result ``[T, E]``, or the sum over the ranks on its way to it, and what it
    comes of: the rotated queries, the indexer's choice and the result of every head ``[T, H, D]``.
    """

    y_TE: Any
    queries: Queries
    selection: Selection | None
    heads_THD: Tensor


@dataclass(frozen=True)
class Attention:
    """One layer's attention. ``compressors``: none for ratio 0, else the main one, and for ratio 4
    the ``indexer``'s.

    ``input_rows``: wq_a, wkv, then the compressor's projections, the indexer's compressor's and its
    weights_proj. ``query_rows``: wq_b, then the indexer's wq_b.
    """

    config: ModelConfig
    input_rows: RowList
    q_norm: Tensor
    query_rows: RowList
    norm: QueryKeyNorm
    sink_H: Tensor
    wo_a: Weight
    wo_b: Weight
    compressors: tuple[CompressorWeights, ...]
    indexer: Indexer | None

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ratio: int, compute_dtype: torch.dtype
    ) -> "Attention":
        sink_H = weights.vector("attn_sink")
        inv_freq = layer_inv_freq(config, ratio).to(sink_H.device)
        compressors: list[CompressorWeights] = []
        indexer = None
        float32_rows: list[str] = []
        queries = ["wq_b.weight"]
        if ratio:
            main = weights.below("compressor")
            compressors.append(
                compressor_weights(config, main, ratio, inv_freq, compute_dtype, rotate_keys=False)
            )
            float32_rows += [f"compressor.{name}" for name in PROJECTIONS]
        if ratio == CSA_RATIO:
            keys = weights.below("indexer.compressor")
            compressors.append(
                compressor_weights(config, keys, ratio, inv_freq, compute_dtype, rotate_keys=True)
            )
            indexer = Indexer(config)
            float32_rows += [f"indexer.compressor.{name}" for name in PROJECTIONS] + [
                "indexer.weights_proj.weight"
            ]
            queries.append("indexer.wq_b.weight")
        inputs = ["wq_a.weight", "wkv.weight", *float32_rows]
        return cls(
            config,
            input_rows=replace(
                weights.row_list(inputs, [None, None, *[torch.float32] * len(float32_rows)]),
                gathered=True,
            ),
            q_norm=weights.vector("q_norm.weight"),
            query_rows=replace(
                weights.row_list(queries, [None] * len(queries)), for_choice=len(queries) - 1
            ),
            norm=QueryKeyNorm(weights.vector("kv_norm.weight"), inv_freq, config.rms_norm_eps),
            sink_H=sink_H,
            wo_a=weights.matrix("wo_a.weight"),
            wo_b=weights.matrix("wo_b.weight"),
            compressors=tuple(compressors),
            indexer=indexer,
        )

    def project(self, ops: Ops, x_TE: Tensor) -> Projections:
        """x ``[T, E]`` (attn_norm output): everything that does not depend on the position or on
        ``AttentionState``.
        """
        low_rank_TR, kv_TD, *compressor_inputs = ops.linear_rows(x_TE, self.input_rows)
        q_TN, *index_queries = ops.linear_rows(
            low_rank_TR, self.query_rows, self.q_norm, self.config.rms_norm_eps
        )
        return Projections(q_TN, kv_TD, tuple(compressor_inputs), tuple(index_queries))

    def attend(
        self, ops: Ops, projections: Projections, positions_T: Tensor, state: AttentionState
    ) -> Attended:
        """Attention at int64 ``positions`` ``[T]``; updates ``state``."""
        queries = ops.prepare_attention(
            self._queries(projections),
            projections.kv_TD,
            positions_T,
            self.norm,
            state.keys.ring,
            self._compressions(projections.compressor_inputs, state),
        )
        selection = None
        if self.indexer is not None:
            assert queries.index_TID is not None
            assert state.index is not None
            weight_TI = projections.compressor_inputs[-1]
            selection = self.indexer(ops, queries.index_TID, weight_TI, positions_T, state.index)
        heads_THD = ops.sparse_attention(
            queries.q_THD,
            state.keys,
            None if selection is None else selection.selected_TK,
            self.sink_H,
            positions_T,
            self.norm.inv_freq,
        )
        return Attended(self.output(ops, heads_THD), queries, selection, heads_THD)

    def output(self, ops: Ops, heads_THD: Tensor) -> Any:
        """The sublayer's result ``[T, E]`` of what its heads give, or the sum on its way to it."""
        o_TGK = heads_THD.flatten(1).unflatten(1, (self.config.o_groups, -1))
        return ops.row_parallel_linear(ops.grouped_linear(o_TGK, self.wo_a).flatten(1), self.wo_b)

    def _queries(self, projections: Projections) -> Queries:
        q_THD = projections.q_TN.unflatten(-1, (-1, self.config.head_dim))
        if self.indexer is None:
            return Queries(q_THD, None)
        (index_q_TN,) = projections.index_queries
        return Queries(q_THD, index_q_TN.unflatten(-1, (-1, self.config.index_head_dim)))

    def _compressions(
        self, inputs: tuple[Tensor, ...], state: AttentionState
    ) -> tuple[Compression, ...]:
        """``inputs`` are the two products of each compressor, then in a CSA layer the index head
        weights.
        """
        found = []
        caches = (state.compressed, state.index)
        for weights, cache, kv_TW, score_TW in zip(
            self.compressors, caches, inputs[::2], inputs[1::2], strict=False
        ):
            assert cache is not None
            found.append(Compression(kv_TW, score_TW, weights, cache))
        return tuple(found)
