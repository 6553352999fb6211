"""Tensors without memory, which a kernel is compiled for."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor


def byte_tensor(rank: int, multiple: int = 1) -> cute.Tensor:
    """A contiguous uint8 tensor of sizes of its own, 16-byte aligned; its rows are multiples of
    ``multiple`` bytes.
    """
    sizes = [cute.sym_int32() for _ in range(rank - 1)]
    shape = (*sizes, cute.sym_int32(divisibility=multiple))
    return make_fake_compact_tensor(
        cutlass.Uint8, shape, stride_order=tuple(range(rank))[::-1], assumed_align=16
    )
