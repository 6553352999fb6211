"""Index queries on the GPU: rotary embedding and Hadamard rotation in one launch."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.limits import MAX_DECODE_TOKENS

_WARP = 32
# A warp rotates one head at a time. Several blocks of 8 warps share a multiprocessor.
_WARPS = 8
# Few tokens: two heads a block, so that the heads of one token spread over the multiprocessors.
# Many: a block walks all heads of its token, which share one rotation.
_DECODE_HEADS = 2
# Of a lane's load, which rows of 128 values take.
LOAD_BYTES = 8


def index_query(
    recording: Recording, q_TID: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> Tensor:
    """``dsv4.ops.indexer.index_query`` for contiguous bfloat16 q ``[T, I, D]``, D a power of two.

    Rounded after each of the two rotations. Raises ``ValueError`` for another dtype, shape or
    layout.
    """
    check_index_queries(q_TID, positions_T, inv_freq)
    _, heads, width = q_TID.shape
    defines = (
        ("WIDTH", width),
        ("ROPE", 2 * inv_freq.shape[0]),
        ("ALIGNED", int(is_aligned(q_TID, LOAD_BYTES))),
    )
    kernel = Kernel("indexer/index_query", "index_query", defines)
    out_TID = recording.empty_like(q_TID)
    recording.launch(
        by_tokens(_shape, kernel, heads),
        q=q_TID,
        positions=positions_T,
        inv_freq=inv_freq,
        out=out_TID,
        heads=heads,
        normaliser=width**-0.5,
    )
    return out_TID


def _shape(kernel: Kernel, heads: int, tokens: int) -> Shape:
    heads_per_block = _DECODE_HEADS if tokens <= MAX_DECODE_TOKENS else heads
    return Shape(
        kernel,
        (ceil_div(heads, heads_per_block), tokens),
        _WARP * min(_WARPS, heads_per_block),
        numbers={"heads_per_block": heads_per_block},
    )


def check_index_queries(q_TID: Tensor, positions_T: Tensor, inv_freq: Tensor) -> None:
    """Raises ``ValueError`` unless ``index_query`` takes these."""
    check_queries(q_TID)
    tokens, _, width = q_TID.shape
    rotary = inv_freq.shape[0]
    if width & (width - 1) or 2 * rotary > width:
        expected = f"a power of two of at least {2 * rotary}"
        raise ValueError(f"q_TID: found rows of {width}, expected {expected}")
    expect("positions_T", positions_T, torch.int64, (tokens,))
    expect("inv_freq", inv_freq, torch.float32, (rotary,))


def check_queries(q_TID: Tensor) -> None:
    """Raises ``ValueError`` unless these are contiguous bfloat16 rows ``[T, I, D]``."""
    if q_TID.dtype != torch.bfloat16:
        raise ValueError(f"q_TID: found {q_TID.dtype}, expected torch.bfloat16")
    if q_TID.dim() != 3:
        raise ValueError(f"q_TID: found {list(q_TID.shape)}, expected [T, I, D]")
    expect("q_TID", q_TID, torch.bfloat16, tuple(q_TID.shape))
