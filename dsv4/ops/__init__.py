"""The op table: one field per operation of the model, one file per op.

``TORCH`` is the reference that runs anywhere and gives every kernel its meaning. Layers call whatever table they are
built with, so ``dataclasses.replace(table, sparse_attention=TORCH.sparse_attention)`` swaps one op, which is how a
numerical fault is bisected.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dsv4.ops.attention import sparse_attention
from dsv4.ops.compressor import compress
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_pre
from dsv4.ops.indexer import index_query, index_select
from dsv4.ops.kv_write import kv_write
from dsv4.ops.linear import decode_weight, grouped_linear, linear
from dsv4.ops.moe import moe
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope
from dsv4.ops.router import route_hash, route_learned
from dsv4.ops.sampling import argmax_token, sample_token
from dsv4.quant import QuantTensor


@dataclass(frozen=True)
class Ops:
    """Signatures, shapes and meanings are those of the torch functions of the same names in ``dsv4.ops``.

    ``pack_weight`` turns a stored weight into the layout that this table's ``linear``, ``grouped_linear``,
    ``route_*`` and ``moe`` read. Every layout has ``dequantize()`` and ``shape``, so the torch op accepts any of
    them.
    """

    pack_weight: Callable[[QuantTensor], QuantTensor]
    linear: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    hc_pre: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hc_post: Callable[..., Tensor]
    hc_head: Callable[..., Tensor]
    kv_write: Callable[..., None]
    compress: Callable[..., None]
    index_query: Callable[..., Tensor]
    index_select: Callable[..., Tensor]
    sparse_attention: Callable[..., Tensor]
    route_learned: Callable[..., tuple[Tensor, Tensor]]
    route_hash: Callable[..., tuple[Tensor, Tensor]]
    moe: Callable[..., Tensor]
    argmax_token: Callable[..., Tensor]
    sample_token: Callable[..., Tensor]


TORCH = Ops(
    pack_weight=decode_weight,
    linear=linear,
    grouped_linear=grouped_linear,
    rms_norm=rms_norm,
    rope=rope,
    hc_pre=hc_pre,
    hc_post=hc_post,
    hc_head=hc_head,
    kv_write=kv_write,
    compress=compress,
    index_query=index_query,
    index_select=index_select,
    sparse_attention=sparse_attention,
    route_learned=route_learned,
    route_hash=route_hash,
    moe=moe,
    argmax_token=argmax_token,
    sample_token=sample_token,
)
