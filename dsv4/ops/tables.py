"""The CUDA op tables: launchers of the kernels, in the room of their op and named like the torch references.

Activations are bfloat16. Steps of up to 8 tokens take the decode kernels, longer ones the prefill kernels. No op
synchronises, and lengths and positions are read on the device, so that every step can be captured in a CUDA graph.
"""

from dataclasses import replace
from functools import partial

from dsv4.ops import Ops
from dsv4.ops.attention.decode import sparse_attention
from dsv4.ops.hyper_connection.cuda import hc_head, hc_post, hc_pre, hc_seam
from dsv4.ops.indexer.cuda import index_select
from dsv4.ops.linear.decode import grouped_linear, linear, linear_rows, pack_rows
from dsv4.ops.moe.decode import moe
from dsv4.ops.opening.cuda import embed, next_positions
from dsv4.ops.prepare_attention.cuda import prepare_attention
from dsv4.ops.sampling.cuda import argmax_token, sample_token
from dsv4.ops.token_ring.cuda import store_token
from dsv4.weights.packed import pack_weight

CUDA = Ops(
    pack_weight=pack_weight,
    pack_rows=pack_rows,
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

# The same with prefill products of the CuTe DSL kernel, which are faster, but whose compiler takes seconds to import.
CUTEDSL = replace(CUDA, pack_weight=partial(pack_weight, cutedsl=True), pack_rows=partial(pack_rows, cutedsl=True))
