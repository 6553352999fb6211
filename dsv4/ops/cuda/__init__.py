"""The CUDA op table: launchers of the kernels in ``dsv4.kernels``, one file per op, named like the torch references.

Activations are bfloat16. Steps of up to 8 tokens take the decode kernels, longer ones the prefill kernels. No op
synchronises, and lengths and positions are read on the device, so that every step can be captured in a CUDA graph.
"""

from dsv4.ops import Ops
from dsv4.ops.cuda.attention import sparse_attention
from dsv4.ops.cuda.compressor import compress
from dsv4.ops.cuda.hyper_connection import hc_head, hc_post, hc_pre, hc_seam
from dsv4.ops.cuda.indexer import index_query, index_select
from dsv4.ops.cuda.kv_write import kv_write
from dsv4.ops.cuda.linear import grouped_linear, linear, linear_rows, pack_rows
from dsv4.ops.cuda.moe import moe
from dsv4.ops.cuda.norm import rms_norm
from dsv4.ops.cuda.packed import pack_weight
from dsv4.ops.cuda.rope import query_rope
from dsv4.ops.cuda.router import route_hash, route_learned
from dsv4.ops.cuda.sampling import argmax_token, sample_token

CUDA = Ops(
    pack_weight=pack_weight,
    pack_rows=pack_rows,
    linear=linear,
    linear_rows=linear_rows,
    grouped_linear=grouped_linear,
    rms_norm=rms_norm,
    query_rope=query_rope,
    hc_pre=hc_pre,
    hc_seam=hc_seam,
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
