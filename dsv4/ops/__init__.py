"""The operations of the model: one room per operation, and the types of the table that layers call
them through.

``TORCH`` is the reference that runs anywhere and gives every kernel its meaning. Layers are handed
a table with every call, so ``dataclasses.replace(table, sparse_attention=TORCH.sparse_attention)``
swaps one op, which is how a numerical fault is bisected. The tables of the CUDA kernels are in
``dsv4.ops.tables``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache
from dsv4.engine_config import ActivationMode
from dsv4.ops.attention import sparse_attention
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights, hc_head, hc_post, hc_pre, hc_seam
from dsv4.ops.indexer import index_select
from dsv4.ops.linear import RowList, dequantized_rows, grouped_linear, linear, linear_rows
from dsv4.ops.moe import ExpertWeights, Mixture, moe
from dsv4.ops.opening import embed, next_positions
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm, prepare_attention
from dsv4.ops.quantize_activations.emulated import dequantized_weight
from dsv4.ops.router import Router
from dsv4.ops.sampling import sample_token
from dsv4.ops.token_ring import store_token
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


class HcPre(Protocol):
    """``dsv4.ops.hyper_connection.hc_pre``."""

    def __call__(
        self, streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class HcSeam(Protocol):
    """``dsv4.ops.hyper_connection.hc_seam``."""

    def __call__(
        self,
        y_TE: Tensor,
        streams_TME: Tensor,
        post_TM: Tensor,
        comb_TMM: Tensor,
        weights: HcWeights,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class HcPost(Protocol):
    """``dsv4.ops.hyper_connection.hc_post``."""

    def __call__(
        self, y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor
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


@dataclass(frozen=True)
class Packing:
    """How an op table keeps weights: every layout has ``dequantize()`` and ``shape``, so that the
    torch ops accept any of them. Norm weights, biases, sinks and positional biases are float32.
    ``pack_experts`` None: every matrix of experts by ``pack_weight``, one after the other.
    ``native``: weights have native copies beside them, for activations of this mode.
    """

    pack_weight: PackWeight
    pack_rows: PackRows
    pack_experts: PackExperts | None = None
    native: ActivationMode | None = None


@dataclass(frozen=True)
class Ops:
    """The operations of a step. Shapes and meanings are those of the torch functions of the same
    names.
    """

    embed: Embed
    next_positions: NextPositions
    linear: Linear
    linear_rows: LinearRows
    grouped_linear: GroupedLinear
    hc_pre: HcPre
    hc_seam: HcSeam
    hc_post: HcPost
    hc_head: HcHead
    prepare_attention: PrepareAttention
    index_select: IndexSelect
    sparse_attention: SparseAttention
    moe: Moe
    sample_token: SampleToken
    store_token: StoreToken


TORCH = Ops(
    embed=embed,
    next_positions=next_positions,
    linear=linear,
    linear_rows=linear_rows,
    grouped_linear=grouped_linear,
    hc_pre=hc_pre,
    hc_seam=hc_seam,
    hc_post=hc_post,
    hc_head=hc_head,
    prepare_attention=prepare_attention,
    index_select=index_select,
    sparse_attention=sparse_attention,
    moe=moe,
    sample_token=sample_token,
    store_token=store_token,
)


def noticing_nan(ops: Ops, nan_1: Tensor) -> Ops:
    """``ops`` whose torch functions that compare set int32 ``nan_1`` on the host to 1 when they
    meet NaN. What stands in their place stays as it is.
    """
    noticing: dict[str, Callable[..., Any]] = {"index_select": index_select, "moe": moe}
    return replace(
        ops,
        **{
            name: partial(op, nan_1=nan_1)
            for name, op in noticing.items()
            if getattr(ops, name) is op
        },
    )


def torch_packing(mode: ActivationMode) -> Packing:
    """The layouts of the torch ops, for activations of ``mode`` in prefill steps."""
    return Packing(partial(dequantized_weight, mode=mode), partial(dequantized_rows, mode=mode))


TORCH_PACKING = torch_packing("bf16")
