"""The op table: one field per operation of the model, one file per op.

``TORCH`` is the reference that runs anywhere and gives every kernel its meaning. Layers call whatever table they are
built with, so ``dataclasses.replace(table, sparse_attention=TORCH.sparse_attention)`` swaps one op, which is how a
numerical fault is bisected.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor

from dsv4.errors import UserError
from dsv4.ops.attention import sparse_attention
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_pre, hc_seam
from dsv4.ops.indexer import index_select
from dsv4.ops.linear import RowList, decode_rows, decode_weight, grouped_linear, linear, linear_rows
from dsv4.ops.moe import moe
from dsv4.ops.opening import embed, next_positions
from dsv4.ops.prepare_attention import Queries, prepare_attention
from dsv4.ops.sampling import argmax_token, sample_token
from dsv4.ops.token_ring import store_token
from dsv4.quant import QuantTensor, Weight


@dataclass(frozen=True)
class Ops:
    """Signatures, shapes and meanings are those of the torch functions of the same names in ``dsv4.ops``.

    ``pack_weight`` turns a stored weight into the layout that this table's ``linear``, ``grouped_linear`` and
    ``moe`` read, ``pack_rows`` several into the list that ``linear_rows`` reads. Every layout has
    ``dequantize()`` and ``shape``, so the torch ops accept any of them. Norm weights, biases, sinks and positional
    biases are float32.
    """

    pack_weight: Callable[[QuantTensor], Weight]
    pack_rows: Callable[..., RowList]
    embed: Callable[..., tuple[Tensor, Tensor]]
    next_positions: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_rows: Callable[..., tuple[Tensor, ...]]
    grouped_linear: Callable[..., Tensor]
    hc_pre: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hc_seam: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    hc_post: Callable[..., Tensor]
    hc_head: Callable[..., Tensor]
    prepare_attention: Callable[..., Queries]
    index_select: Callable[..., Tensor]
    sparse_attention: Callable[..., Tensor]
    moe: Callable[..., Tensor]
    argmax_token: Callable[..., Tensor]
    sample_token: Callable[..., Tensor]
    store_token: Callable[..., None]


TableName = Literal["torch", "cuda", "cutedsl"]


def op_table(name: TableName) -> Ops:
    """``TORCH``, or ``CUDA`` or ``CUTEDSL`` of ``dsv4.ops.tables``, which is imported only when asked for.

    Raises ``UserError`` when a table's packages (cuda-core, nvidia-cutlass-dsl) are not installed.
    """
    if name == "torch":
        return TORCH
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise UserError("--ops: the CUDA ops need cuda-core, found none: pip install dsv4[cuda], or --ops torch")
    if name == "cutedsl" and importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        raise UserError("--ops: cutedsl needs nvidia-cutlass-dsl, found none: pip install dsv4[cuda], or --ops cuda")
    tables = importlib.import_module("dsv4.ops.tables")
    return tables.CUTEDSL if name == "cutedsl" else tables.CUDA


def swap_ops(table: Ops, swaps: Mapping[str, TableName]) -> Ops:
    """``table`` with some ops taken from other tables, by field name. Raises ``UserError`` for an unknown op.

    Packing belongs to the table as a whole and cannot be swapped: every op reads any packed layout.
    """
    names = {field.name for field in fields(Ops)} - {"pack_weight", "pack_rows"}
    for name in swaps:
        if name not in names:
            raise UserError(f"--swap: found op {name!r}, expected one of {', '.join(sorted(names))}")
    return replace(table, **{name: op_table(source).__dict__[name] for name, source in swaps.items()})


TORCH = Ops(
    pack_weight=decode_weight,
    pack_rows=decode_rows,
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
    argmax_token=argmax_token,
    sample_token=sample_token,
    store_token=store_token,
)
