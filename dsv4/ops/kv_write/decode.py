"""Window key rows of 1 to 8 tokens: one warp per row norms, rotates, quantises and stores it."""

from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.key_rows import row_code
from dsv4.ops.kv_write.rows import KeyRows, check, write_by_blocks

_WARP = 32


def kv_write(
    recording: Recording,
    kv_TD: Tensor,
    norm_weight: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    ring: RowCache,
    eps: float,
) -> None:
    """``dsv4.ops.kv_write.kv_write`` for contiguous bfloat16 kv ``[T, D]``, D up to 4096.

    The ring holds KV_FP8 or PLAIN rows; ``norm_weight`` is float32. The row is rounded to bfloat16
    after the norm and after the rotation. Raises ``ValueError`` for another dtype, shape or layout.
    """
    rows = KeyRows(kv_TD, norm_weight, positions_T, inv_freq, ring, eps)
    check(rows)
    if not rows.in_vectors:
        write_by_blocks(recording, rows, "kv_write_any_geometry")
        return
    defines = (("WIDTH", ring.width), ("ROPE", ring.rope_width))
    kernel = Kernel("rope/query_rope", "query_rope", defines)
    # The kernel can rotate queries in the same launch; here there are none.
    recording.launch(
        lambda tokens: Shape(kernel, (1, tokens), _WARP),
        q=None,
        positions=positions_T,
        inv_freq=inv_freq,
        out=None,
        kv=kv_TD,
        norm_weight=norm_weight,
        ring_data=ring.data,
        ring_scale=ring.block_scale,
        format=row_code(ring),
        slots=ring.slots,
        heads=0,
        rows_per_block=1,
        eps=eps,
    )
