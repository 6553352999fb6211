"""The packing of a table whose prefill takes quantised activations: every weight packed, with a
native copy beside it where it has one.
"""

from functools import partial

from dsv4.ops import Packing
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.moe.native import pack_native_experts
from dsv4.weights.packed_native import pack_with_native


def native_packing(nvfp4: bool) -> Packing:
    """``nvfp4``: NVFP4 weights are to meet NVFP4 activations; else only those that are MXFP4 in
    disguise have a native copy.

    ``PackedWithNative.unsupported`` and ``NativeExperts.unsupported`` say why a weight has none.
    """
    pack = partial(pack_with_native, nvfp4=nvfp4)
    experts = partial(pack_native_experts, nvfp4=nvfp4)
    return Packing(pack, partial(pack_rows, pack=pack), experts)
