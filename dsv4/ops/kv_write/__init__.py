"""Window keys: normalise, rotate, quantise, store in the ring (model.md#queries-and-keys)."""

from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope


def kv_write(
    kv_TD: Tensor,
    norm_weight: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    ring: RowCache,
    eps: float,
) -> None:
    """ring[position mod slots] = quantise(rope(rms_norm(kv) · w)) for kv ``[T, D]`` at int64
    ``positions`` ``[T]``.

    T must not exceed the ring. The one row serves as key and as value.
    """
    rows = rope(rms_norm(kv_TD, norm_weight, eps), positions_T, inv_freq)
    ring.write(positions_T % ring.slots, rows)
