"""How the ops of a table are called. Shapes and meanings are those of the torch functions that each
type names.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.linear import RowList
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from dsv4.ops.router import Router
from dsv4.weights.quant import QuantTensor, Weight


class PackWeight(Protocol):
    """``dsv4.ops.quantize_activations.emulated.dequantized_weight``."""

    def __call__(self, weight: QuantTensor) -> Weight: ...


class PackRows(Protocol):
    """``dsv4.ops.linear.dequantized_rows``."""

    def __call__(
        self, weights: Sequence[QuantTensor], out_dtypes: Sequence[torch.dtype | None]
    ) -> RowList: ...


class PackExperts(Protocol):
    """w1, w2 and w3 of a stack of experts or of the shared one, at once."""

    def __call__(self, w1: QuantTensor, w2: QuantTensor, w3: QuantTensor) -> ExpertWeights: ...


class Embed(Protocol):
    """``dsv4.ops.opening.embed``."""

    def __call__(
        self,
        tokens_T: Tensor,
        position_1: Tensor,
        rejected_1: Tensor,
        table_VE: Tensor,
        streams: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...


class NextPositions(Protocol):
    """``dsv4.ops.opening.next_positions``."""

    def __call__(self, position_1: Tensor, rejected_1: Tensor, tokens: int) -> Tensor: ...


class Linear(Protocol):
    """``dsv4.ops.linear.linear``."""

    def __call__(
        self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


class LinearRows(Protocol):
    """``dsv4.ops.linear.linear_rows``."""

    def __call__(
        self, x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
    ) -> tuple[Tensor, ...]: ...


class GroupedLinear(Protocol):
    """``dsv4.ops.linear.grouped_linear``."""

    def __call__(self, x_TGK: Tensor, weight: Weight) -> Tensor: ...


class RowParallelLinear(Protocol):
    """``dsv4.ops.exchange.row_parallel_linear``; kernels may return the sum on its way."""

    def __call__(self, x_TK: Tensor, weight: Weight) -> Any: ...


class VocabParallelLinear(Protocol):
    """``dsv4.ops.exchange.vocab_parallel_linear``; kernels may return logits on their way."""

    def __call__(self, hidden_TE: Tensor, weight: Weight) -> Any: ...


class GatherLogits(Protocol):
    """``dsv4.ops.exchange.gather_logits`` of what ``vocab_parallel_linear`` returned."""

    def __call__(self, logits_TV: Any) -> Tensor: ...


class Summed(Protocol):
    """``dsv4.ops.exchange.summed`` of y as a sublayer returned it."""

    def __call__(self, y_TE: Any) -> Tensor: ...


class HcPre(Protocol):
    """``dsv4.ops.hyper_connection.hc_pre``."""

    def __call__(
        self, streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class HcSeam(Protocol):
    """``dsv4.ops.hyper_connection.hc_seam`` of y as a sublayer returned it."""

    def __call__(
        self,
        y_TE: Any,
        streams_TME: Tensor,
        post_TM: Tensor,
        comb_TMM: Tensor,
        weights: HcWeights,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class HcPost(Protocol):
    """``dsv4.ops.hyper_connection.hc_post`` of y as a sublayer returned it."""

    def __call__(
        self, y_TE: Any, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor
    ) -> Tensor: ...


class HcHead(Protocol):
    """``dsv4.ops.hyper_connection.hc_head``."""

    def __call__(
        self, streams_TME: Tensor, weights: HcHeadWeights, norm_weight: Tensor
    ) -> Tensor: ...


class PrepareAttention(Protocol):
    """``dsv4.ops.prepare_attention.prepare_attention``."""

    def __call__(
        self,
        queries: Queries,
        kv_TD: Tensor,
        positions_T: Tensor,
        norm: QueryKeyNorm,
        ring: RowCache,
        compressions: tuple[Compression, ...],
    ) -> Queries: ...


class IndexSelect(Protocol):
    """``dsv4.ops.indexer.index_select``."""

    def __call__(
        self,
        q_TID: Tensor,
        weight_TI: Tensor,
        score_scale: float,
        keys: RowCache,
        positions_T: Tensor,
        index_topk: int,
    ) -> Tensor: ...


class SparseAttention(Protocol):
    """``dsv4.ops.attention.sparse_attention``."""

    def __call__(
        self,
        q_THD: Tensor,
        keys: KeySet,
        selected_TK: Tensor | None,
        sink_H: Tensor,
        positions_T: Tensor,
        inv_freq: Tensor,
    ) -> Tensor: ...


class Moe(Protocol):
    """``dsv4.ops.moe.moe``."""

    def __call__(
        self,
        x_TE: Tensor,
        tokens_T: Tensor,
        router: Router,
        experts: ExpertWeights,
        shared: ExpertWeights,
        limit: float,
    ) -> Mixture: ...


class SampleToken(Protocol):
    """``dsv4.ops.sampling.sample_token``."""

    def __call__(
        self, logits_V: Tensor, settings_4: Tensor, seed_1: Tensor, position_1: Tensor
    ) -> Tensor: ...


class StoreToken(Protocol):
    """``dsv4.ops.token_ring.store_token``."""

    def __call__(
        self, token: Tensor, position_1: Tensor, next_1: Tensor, ring_R: Tensor, nan_1: Tensor
    ) -> None: ...
