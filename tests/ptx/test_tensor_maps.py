"""Tensor maps that the driver encodes, as the machine reads them; and what boxes they move."""

import ctypes
import importlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.ptx.faults import BadDescriptor, OutOfBounds
from tests.ptx.memory import GlobalMemory
from tests.ptx.tensor_map import ELEMENTS, TensorMap, swizzled

UINT8 = ELEMENTS[0]
BF16 = ELEMENTS[10]
PACKED = ELEMENTS[11]
IN_BYTES = ELEMENTS[12]
ADDRESS = 0x7F1234560000


class Map(NamedTuple):
    """Arguments of cuTensorMapEncodeTiled; strides in bytes."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    promotion: int = 0


# The ninth has a stride beyond 2^36 bytes: its upper bits lie in a word of their own.
MAPS = (
    Map("UINT8", (64, 3), (64,), (64, 1)),
    Map("UINT8", (512, 96), (512,), (128, 64), 3, 2),
    Map("UINT8", (48, 7), (48,), (16, 5)),
    Map("UINT16", (100, 100), (208,), (8, 100)),
    Map("UINT32", (128, 4, 12), (512, 2048), (128, 1, 4), 0, 1),
    Map("INT32", (128, 2, 3), (512, 1024), (128, 2, 3)),
    Map("FLOAT32", (192, 64), (768,), (32, 32), 3),
    Map("FLOAT16", (64, 9), (128,), (32, 9), 2),
    Map("BFLOAT16", (256, 2, 2), (1 << 37, 1 << 39), (64, 2, 1), 3, 3),
    Map("BFLOAT16", (7168, 4096), (14336,), (64, 256), 3, 2),
    Map("BFLOAT16", (64, 300, 3), (128, 38400), (16, 8, 1), 1),
    Map("BFLOAT16", (33, 5), (80,), (24, 2)),
    Map("UINT8", (16, 8, 4, 2), (16, 128, 512), (16, 8, 2, 1)),
    Map("UINT8", (16, 3, 5, 7, 2), (48, 144, 720, 5040), (16, 3, 5, 7, 2)),
    Map("UINT16", (256, 16, 4, 8), (512, 8192, 32768), (256, 1, 2, 1)),
    Map("BFLOAT16", (1 << 20, 1 << 12), (1 << 21,), (64, 1), 3),
    Map("UINT32", (1 << 16, 1 << 16), (1 << 18,), (4, 256)),
    Map("UINT64", (10, 6), (80,), (2, 6)),
    Map("UINT8", (1 << 31, 2), (1 << 31,), (256, 1)),
    Map("FLOAT16", (96, 2, 2), (1 << 20, 1 << 30), (64, 2, 2), 3, 1),
)
BITS = {"UINT8": 8, "UINT16": 16, "FLOAT16": 16, "BFLOAT16": 16, "UINT64": 64}


def encoded(case: Map) -> bytes:
    driver = importlib.import_module("cuda.bindings.driver")
    torch.cuda.synchronize()  # The driver encodes in a context alone: this makes one.
    error, result = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{case.dtype}"),
        len(case.sizes),
        ADDRESS,
        [driver.cuuint64_t(size) for size in case.sizes],
        [driver.cuuint64_t(stride) for stride in case.strides],
        [driver.cuuint32_t(size) for size in case.box],
        [driver.cuuint32_t(1) for _ in case.box],
        driver.CUtensorMapInterleave(0),
        driver.CUtensorMapSwizzle(case.swizzle),
        driver.CUtensorMapL2promotion(case.promotion),
        driver.CUtensorMapFloatOOBfill(0),
    )
    assert error == 0, (case, error)
    return ctypes.string_at(result.getPtr(), 128)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MAPS, ids=[f"{n}-{case.dtype}" for n, case in enumerate(MAPS)])
def test_reads_what_the_driver_encodes(case: Map) -> None:
    raw = encoded(case)
    words = " ".join(f"{word:08x}" for word in np.frombuffer(raw, np.uint32)[:16])
    found = TensorMap.decode(raw)
    assert found.address == ADDRESS, words
    assert found.element.bits == BITS.get(case.dtype, 32), words
    assert found.element.spread == 1, words
    assert (found.sizes, found.strides, found.box) == (case.sizes, case.strides, case.box), words
    assert found.swizzle == case.swizzle, words


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "spread"), [("16U4_ALIGN8B", 1), ("16U4_ALIGN16B", 2)])
def test_reads_4_bit_maps_where_the_driver_encodes_them(dtype: str, spread: int) -> None:
    try:
        raw = encoded(Map(dtype, (256, 64), (128,), (128, 64), 3))
    except AssertionError:
        pytest.skip("the driver encodes no 4-bit maps for this device")
    found = TensorMap.decode(raw)
    assert (found.element.bits, found.element.spread) == (4, spread)
    assert (found.sizes, found.strides, found.box) == ((256, 64), (128,), (128, 64))


def in_memory(values: np.ndarray, **fields: Any) -> tuple[TensorMap, GlobalMemory]:
    memory = GlobalMemory()
    memory.register("tensor", values.ctypes.data, values.nbytes)
    tensor = TensorMap(values.ctypes.data, **fields)
    assert TensorMap.decode(tensor.encode()) == tensor
    return tensor, memory


def test_a_box_is_filled_with_zeros_outside_the_tensor() -> None:
    values = np.arange(1, 1 + 5 * 48, dtype=np.uint8).reshape(5, 48)
    tensor, memory = in_memory(
        values, element=UINT8, sizes=(40, 5), strides=(48,), box=(32, 4), swizzle=0
    )
    for corner in ((0, 0), (16, 3), (-8, -2), (39, 4), (200, 0), (0, 7)):
        expected = np.zeros((4, 32), np.uint8)
        for row in range(4):
            for column in range(32):
                x, y = corner[0] + column, corner[1] + row
                if 0 <= x < 40 and 0 <= y < 5:
                    expected[row, column] = values[y, x]
        assert np.array_equal(tensor.load(corner, memory).reshape(4, 32), expected), corner


def test_a_store_leaves_out_what_is_outside_the_tensor() -> None:
    values = np.zeros((3, 32), np.uint8)
    tensor, memory = in_memory(
        values, element=UINT8, sizes=(24, 3), strides=(32,), box=(16, 2), swizzle=0
    )
    tensor.store((16, 2), memory, np.full(32, 7, np.uint8))
    expected = np.zeros((3, 32), np.uint8)
    expected[2, 16:24] = 7
    assert np.array_equal(values, expected)


def test_a_map_larger_than_its_tensor_is_out_of_bounds() -> None:
    values = np.zeros((3, 32), np.uint8)
    tensor, memory = in_memory(
        values, element=UINT8, sizes=(32, 4), strides=(32,), box=(32, 4), swizzle=0
    )
    with pytest.raises(OutOfBounds):
        tensor.load((0, 0), memory)


def test_gather_takes_four_rows() -> None:
    values = np.arange(6 * 16, dtype=np.uint8).reshape(6, 16)
    tensor, memory = in_memory(
        values, element=UINT8, sizes=(16, 6), strides=(16,), box=(16, 1), swizzle=0
    )
    rows = tensor.gather(0, [4, 0, 9, 4], memory).reshape(4, 16)
    assert np.array_equal(rows, np.stack([values[4], values[0], 0 * values[0], values[4]]))
    wrong, memory = in_memory(
        values, element=UINT8, sizes=(16, 6), strides=(16,), box=(16, 2), swizzle=0
    )
    with pytest.raises(BadDescriptor):
        wrong.gather(0, [0, 1, 2, 3], memory)


def test_4_bit_codes_in_bytes_fill_half_of_every_16_bytes() -> None:
    values = np.arange(2 * 64, dtype=np.uint8).reshape(2, 64)
    fields: dict[str, Any] = {"sizes": (128, 2), "strides": (64,), "box": (128, 2), "swizzle": 0}
    tensor, memory = in_memory(values, element=IN_BYTES, **fields)
    data = tensor.load((0, 0), memory).reshape(2, 8, 16)
    assert np.array_equal(data[:, :, :8].reshape(2, 64), values)
    assert (data[:, :, 8:] == 0xFF).all()
    assert tensor.box_bytes == 256
    packed, memory = in_memory(values, element=PACKED, **fields)
    assert np.array_equal(packed.load((0, 0), memory), values.reshape(-1))


@pytest.mark.parametrize(("bits", "width"), [(1, 32), (2, 64), (3, 128)])
def test_swizzles_exchange_16_byte_units(bits: int, width: int) -> None:
    # Byte by byte, as the programming guide draws it: rows of the pattern have 128 bytes.
    at = np.arange(1024)
    moved = swizzled(at, bits)
    assert sorted(moved.tolist()) == at.tolist()
    for address in range(0, 1024, 16):
        row = address // 128 % (1 << bits)
        unit = address // 16 % 8
        assert moved[address] == address // 128 * 128 + (unit ^ row) * 16
    assert width == 16 << bits


def test_a_wrong_kind_of_element_is_refused() -> None:
    raw = bytearray(TensorMap(0, BF16, (8,), (), (8,), 0).encode())
    raw[8:12] = (int.from_bytes(raw[8:12], "little") | 15 << 7).to_bytes(4, "little")
    with pytest.raises(BadDescriptor):
        TensorMap.decode(bytes(raw))
