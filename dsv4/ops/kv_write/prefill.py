"""Window key rows of 9 and more tokens: norm, rotation, quantisation and the store by one block per
row.
"""

from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.recording import Recording
from dsv4.ops.kv_write.rows import KeyRows, check, write_by_blocks


def kv_write(
    recording: Recording,
    kv_TD: Tensor,
    norm_weight: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    ring: RowCache,
    eps: float,
) -> None:
    """As ``dsv4.ops.kv_write.decode.kv_write``.

    A block has a higher throughput than a warp alone, which has the shorter latency. Both take the
    same geometries here; the kernel's name tells those apart that a decode step has no faster
    kernel for.
    """
    rows = KeyRows(kv_TD, norm_weight, positions_T, inv_freq, ring, eps)
    check(rows)
    write_by_blocks(recording, rows, "kv_write" if rows.in_vectors else "kv_write_any_geometry")
