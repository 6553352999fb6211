"""Per-head norm and rotary embedding of queries on the GPU: one warp per head."""

import torch
from torch import Tensor

from dsv4.launch.loader import launch
from dsv4.ops.attention.decode import expect
from dsv4.ops.kv_write.cuda import in_vectors, launch_rows

_ANY_THREADS = 128


def query_rope(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
    """``dsv4.ops.rope.query_rope`` for bfloat16 q ``[T, H, D]``: rounded after the norm and after the rotation.

    Strided q is made contiguous first. Raises ``ValueError`` for another dtype, shape or device.
    """
    check_queries(q_THD, positions_T, inv_freq)
    q_THD, rope_width = q_THD.contiguous(), 2 * inv_freq.shape[0]
    if q_THD.numel() == 0:
        return torch.empty_like(q_THD)
    if in_vectors(q_THD, rope_width):
        out_THD = launch_rows(q_THD, positions_T, inv_freq, eps, None)
        assert out_THD is not None
        return out_THD
    out_THD = torch.empty_like(q_THD)
    tokens, heads, width = q_THD.shape
    launch(
        "query_rope",
        "query_rope_any",
        (heads, tokens),
        _ANY_THREADS,
        q_THD,
        positions_T,
        inv_freq,
        out_THD,
        heads,
        width,
        rope_width,
        float(eps),
        device=q_THD.device,
    )
    return out_THD


def check_queries(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor) -> None:
    """Raises ``ValueError`` unless ``query_rope`` takes these."""
    if q_THD.dtype != torch.bfloat16:
        raise ValueError(f"q_THD: found {q_THD.dtype}, expected torch.bfloat16")
    rope_width = 2 * inv_freq.shape[0]
    if q_THD.dim() != 3 or q_THD.shape[2] < rope_width:
        raise ValueError(f"q_THD: found {list(q_THD.shape)}, expected [T, H, D] with D at least {rope_width}")
    expect("positions_T", positions_T, torch.int64, (q_THD.shape[0],), q_THD.device)
    expect("inv_freq", inv_freq, torch.float32, (rope_width // 2,), q_THD.device)
