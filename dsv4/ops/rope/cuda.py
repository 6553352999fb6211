"""Per-head norm and rotary embedding of queries on the GPU: one warp per head."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.key_rows import in_vectors

WARP = 32
WARPS = 8
# Few tokens: a warp per head, so that the heads of a token spread over the multiprocessors.
DECODE_ROWS_PER_BLOCK = WARPS
# Threads of a block of the form for any geometry. No record compares other numbers.
_ANY_THREADS = 128


def query_rope(
    recording: Recording,
    q_THD: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    eps: float,
    rows_per_block: int | None = None,
) -> Tensor:
    """``dsv4.ops.rope.query_rope`` for contiguous bfloat16 q ``[T, H, D]``.

    Rounded after the norm and after the rotation. ``rows_per_block``: heads of a token that a block
    takes; None, for steps of many tokens, are all of them, which share one rotation. Raises
    ``ValueError`` for another dtype, shape or layout.
    """
    check_queries(q_THD, positions_T, inv_freq)
    rope_width = 2 * inv_freq.shape[0]
    if not in_vectors(q_THD, rope_width):
        return _any_geometry(recording, q_THD, positions_T, inv_freq, eps)
    _, heads, width = q_THD.shape
    rows = rows_per_block or heads
    kernel = Kernel("rope/query_rope", "query_rope", (("WIDTH", width), ("ROPE", rope_width)))
    out_THD = recording.empty_like(q_THD)
    recording.launch(
        by_tokens(_shape, kernel, ceil_div(heads, rows), WARP * min(WARPS, heads)),
        q=q_THD,
        positions=positions_T,
        inv_freq=inv_freq,
        out=out_THD,
        kv=None,
        norm_weight=None,
        ring_data=None,
        ring_scale=None,
        format=0,
        slots=1,
        heads=heads,
        rows_per_block=rows,
        eps=eps,
    )
    return out_THD


def check_queries(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor) -> None:
    """Raises ``ValueError`` unless ``query_rope`` takes these."""
    rope_width = 2 * inv_freq.shape[0]
    if q_THD.dim() != 3 or q_THD.shape[2] < rope_width:
        expected = f"[T, H, D] with D at least {rope_width}"
        raise ValueError(f"q_THD: found {list(q_THD.shape)}, expected {expected}")
    expect("q_THD", q_THD, torch.bfloat16, tuple(q_THD.shape))
    expect("positions_T", positions_T, torch.int64, (q_THD.shape[0],))
    expect("inv_freq", inv_freq, torch.float32, (rope_width // 2,))


def _any_geometry(
    recording: Recording, q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float
) -> Tensor:
    _, heads, width = q_THD.shape
    kernel = Kernel("rope/query_rope", "query_rope_any_geometry")
    out_THD = recording.empty_like(q_THD)
    recording.launch(
        by_tokens(_shape, kernel, heads, _ANY_THREADS),
        q=q_THD,
        positions=positions_T,
        inv_freq=inv_freq,
        out=out_THD,
        heads=heads,
        width=width,
        rope_width=2 * inv_freq.shape[0],
        eps=eps,
    )
    return out_THD


def _shape(kernel: Kernel, blocks: int, threads: int, tokens: int) -> Shape:
    return Shape(kernel, (blocks, tokens), threads)
