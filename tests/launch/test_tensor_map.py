"""How the driver is told of boxes: everything from the innermost dimension on, in bytes."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch import loading, tensor_map
from dsv4.launch.boxes import Boxes

BINDINGS = loading.driver()
RESULT = BINDINGS.CUresult
TYPES = BINDINGS.CUtensorMapDataType
SWIZZLES = BINDINGS.CUtensorMapSwizzle
# Behind what a map has there is other memory.
MAP = ctypes.create_string_buffer(bytes(range(1, 129)) + b"more", 132)
# Slices further apart than they are long, in values: 10 of 3 of 64.
HALVES = torch.empty(2560, dtype=torch.bfloat16).as_strided((10, 3, 64), (256, 64, 1))
WORDS = torch.empty(6, 32, dtype=torch.int32)


def encode(
    monkeypatch: pytest.MonkeyPatch, boxes: Boxes, error: Any = RESULT.CUDA_SUCCESS
) -> tuple[bytes, list[Any]]:
    """The map of boxes at the address 4096, and what the driver was asked."""
    asked: list[Any] = []

    def answer(*arguments: Any) -> tuple[Any, Any]:
        asked.extend(arguments)
        return error, SimpleNamespace(getPtr=lambda: ctypes.addressof(MAP))

    names = [name for name in dir(BINDINGS) if name.startswith(("cuuint", "CUtensorMap"))]
    fake = SimpleNamespace(**{name: getattr(BINDINGS, name) for name in names})
    fake.cuTensorMapEncodeTiled = answer
    monkeypatch.setattr(tensor_map, "driver", lambda: fake)
    return tensor_map.tensor_map(boxes, 4096), asked


@pytest.mark.parametrize(
    ("tensor", "box", "swizzled", "expected"),
    [
        (HALVES, (8, 1, 64), True, (TYPES.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, [128, 512])),
        (WORDS, (4, 8), False, (TYPES.CU_TENSOR_MAP_DATA_TYPE_INT32, [128])),
    ],
)
def test_the_driver_gets_the_innermost_dimension_first(
    tensor: Tensor,
    box: tuple[int, ...],
    swizzled: bool,
    expected: tuple[Any, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows need no stride of their values; boxes have all values of their part of the tensor."""
    encoded, asked = encode(monkeypatch, Boxes(tensor, box, swizzled))
    values, strides = expected
    values_found, rank, address, sizes, strides_found, sides, steps, *modes = asked
    assert (values_found, rank, address) == (values, tensor.dim(), 4096)
    assert list(map(int, sizes)) == [*reversed(tensor.shape)]
    assert list(map(int, strides_found)) == strides
    assert list(map(int, sides)) == [*reversed(box)]
    assert list(map(int, steps)) == [1] * tensor.dim()
    swizzle = (
        SWIZZLES.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else SWIZZLES.CU_TENSOR_MAP_SWIZZLE_NONE
    )
    assert modes[1] == swizzle
    # Rows behind the last one read as zeros.
    assert modes[3] == BINDINGS.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    assert encoded == bytes(range(1, 129))


def test_what_the_driver_refuses_is_said_with_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Boxes(WORDS, (4, 8))
    message = r"CUDA driver error: CUDA_ERROR_INVALID_VALUE for boxes of \(6, 32\)"
    with pytest.raises(RuntimeError, match=message):
        encode(monkeypatch, boxes, RESULT.CUDA_ERROR_INVALID_VALUE)
