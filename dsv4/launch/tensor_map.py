"""What the driver makes of boxes: the bytes by which a kernel names them to TMA."""

import ctypes

import torch

from dsv4.launch.boxes import Boxes
from dsv4.launch.loading import driver

MAP_BYTES = 128
_TYPES = {
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.int32: "CU_TENSOR_MAP_DATA_TYPE_INT32",
}


def tensor_map(boxes: Boxes, address: int) -> bytes:
    """The 128 bytes that TMA reads, for the tensor at this address of a device. Raises
    ``RuntimeError`` where the driver refuses.
    """
    bindings = driver()
    tensor = boxes.tensor
    one = bindings.cuuint32_t(1)
    swizzle = "128B" if boxes.swizzled else "NONE"
    error, encoded = bindings.cuTensorMapEncodeTiled(
        getattr(bindings.CUtensorMapDataType, _TYPES[tensor.dtype]),
        tensor.dim(),
        address,
        [bindings.cuuint64_t(size) for size in reversed(tensor.shape)],
        [
            bindings.cuuint64_t(stride * tensor.itemsize)
            for stride in reversed(tensor.stride()[:-1])
        ],
        [bindings.cuuint32_t(values) for values in reversed(boxes.box)],
        [one] * tensor.dim(),
        bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(bindings.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise RuntimeError(f"CUDA driver error: {error.name} for boxes of {tuple(tensor.shape)}")
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)
