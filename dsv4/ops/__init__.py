"""The operations of the model: one room per operation, and the table that layers call them through.

``TORCH`` is the reference that runs anywhere and gives every kernel its meaning. Layers are handed
a table with every call, so ``dataclasses.replace(table, sparse_attention=TORCH.sparse_attention)``
swaps one op, which is how a numerical fault is bisected. The tables of the CUDA kernels are in
``dsv4.ops.tables``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.ops.attention import sparse_attention
from dsv4.ops.call_types import (
    Embed,
    GatherLogits,
    GroupedLinear,
    HcHead,
    HcPost,
    HcPre,
    HcSeam,
    IndexSelect,
    Linear,
    LinearRows,
    Moe,
    NextPositions,
    PackExperts,
    PackRows,
    PackWeight,
    PrepareAttention,
    RowParallelLinear,
    SampleToken,
    SparseAttention,
    StoreToken,
    Summed,
    VocabParallelLinear,
)
from dsv4.ops.exchange import (
    gather_logits,
    row_parallel_linear,
    summed,
    vocab_parallel_linear,
)
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_pre, hc_seam
from dsv4.ops.indexer import index_select
from dsv4.ops.linear import dequantized_rows, grouped_linear, linear, linear_rows
from dsv4.ops.moe import Mixture, moe
from dsv4.ops.nan import note_nan
from dsv4.ops.opening import embed, next_positions
from dsv4.ops.prepare_attention import prepare_attention
from dsv4.ops.quantize_activations.emulated import dequantized_weight
from dsv4.ops.sampling import sample_token
from dsv4.ops.token_ring import store_token


@dataclass(frozen=True)
class Packing:
    """How an op table keeps weights: every layout has ``dequantize()`` and ``shape``, so that the
    torch ops accept any of them. Norm weights, biases, sinks and positional biases are float32.
    ``pack_experts`` None: every matrix of experts by ``pack_weight``, one after the other.
    ``native``: weights have native copies beside them, for activations of this mode. Packings of
    one ``name`` make the same bytes of the same weights.
    """

    name: str
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
    row_parallel_linear: RowParallelLinear
    vocab_parallel_linear: VocabParallelLinear
    gather_logits: GatherLogits
    summed: Summed
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
    row_parallel_linear=row_parallel_linear,
    vocab_parallel_linear=vocab_parallel_linear,
    gather_logits=gather_logits,
    summed=summed,
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
    noticing: dict[str, Callable[..., Any]] = {}
    if ops.index_select is index_select:
        noticing["index_select"] = partial(index_select, nan_1=nan_1)
    if ops.moe is moe:
        noticing["moe"] = partial(_moe_noticing_nan, nan_1)
    return replace(ops, **noticing)


def _moe_noticing_nan(nan_1: Tensor, *arguments: Any, **named: Any) -> Mixture:
    mixture = moe(*arguments, **named)
    note_nan(nan_1, mixture.weights_TP)
    return mixture


def torch_packing(mode: ActivationMode) -> Packing:
    """The layouts of the torch ops, for activations of ``mode`` in prefill steps."""
    return Packing(
        f"torch {mode}",
        partial(dequantized_weight, mode=mode),
        partial(dequantized_rows, mode=mode),
    )


TORCH_PACKING = torch_packing("bf16")
