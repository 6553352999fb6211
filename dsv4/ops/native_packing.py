"""The packing of a table whose prefill takes quantised activations: every weight packed, with a
native copy beside it where it has one.
"""

from functools import partial

from dsv4.engine_config import ActivationMode
from dsv4.ops import Packing
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.moe.native import pack_native_experts
from dsv4.weights.packed_native import pack_with_native


def native_packing(activations: ActivationMode) -> Packing:
    """For activations in "fp8", which NVFP4 weights meet only where they are MXFP4 in disguise, or
    in "nvfp4".

    ``PackedWithNative.unsupported`` and ``NativeExperts.unsupported`` say why a weight has no
    native copy.
    """
    nvfp4 = activations == "nvfp4"
    pack = partial(pack_with_native, nvfp4=nvfp4)
    experts = partial(pack_native_experts, nvfp4=nvfp4)
    rows = partial(pack_rows, pack=pack)
    return Packing(f"cuda with native {activations}", pack, rows, experts, activations)
