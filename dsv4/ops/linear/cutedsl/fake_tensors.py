"""Tensors without memory, which a kernel is compiled for."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor


def byte_tensor(rank: int) -> cute.Tensor:
    """A contiguous uint8 tensor of sizes of its own, 16-byte aligned."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_compact_tensor(
        cutlass.Uint8, shape, stride_order=tuple(range(rank))[::-1], assumed_align=16
    )
