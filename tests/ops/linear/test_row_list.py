"""pack_rows: the matrices keep their values, lie by format, and the table says where."""

import pytest
import torch

from dsv4.ops.linear import dequantized_rows
from dsv4.ops.linear.row_list import PackedRows, pack_rows, packed_rows
from dsv4.weights.quant import QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4

MATRICES = [(64, MXFP4), (40, FP8), (24, BF16), (72, NVFP4), (200, FP8)]
DTYPES = [None, torch.float32, None, torch.bfloat16, None]


def weights() -> list[QuantTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        quantize(torch.randn(rows, 128, generator=generator), format) for rows, format in MATRICES
    ]


def test_matrices_keep_their_values_and_lie_by_format() -> None:
    rows = pack_rows(weights(), DTYPES)
    for stored, packed in zip(weights(), rows.weights, strict=True):
        assert torch.equal(packed.dequantize(), stored.dequantize())
    formats = [part.format for launch in rows.launches for part in launch.parts]
    assert formats == [NVFP4, MXFP4, FP8, BF16]
    fp8 = rows.launches[1].parts[0]
    assert fp8.tiles == (64 + 256) // 16
    assert fp8.block_scale is not None
    # One row of scales per 64 rows.
    assert fp8.block_scale.shape == (1 + 4, 1)
    for index in (1, 4):
        storage = rows.weights[index].data.untyped_storage()
        assert storage.data_ptr() == fp8.data.untyped_storage().data_ptr()


def test_the_table_says_where_matrices_and_products_lie() -> None:
    rows = pack_rows(weights(), DTYPES)
    assert rows.width == 128
    # float32 first: 40 rows of 4 bytes, then 2 bytes each.
    assert rows.offsets == (160, 0, 288, 336, 480)
    assert rows.bytes_per_token == 880
    first, second = rows.launches
    assert first.table.tolist() == [[0, 72, 336, 0], [8, 64, 160, 0]]
    assert second.table.tolist() == [[0, 40, 0, 1], [4, 200, 480, 0], [20, 24, 288, 0]]
    total = rows.weights[3].global_scale
    assert total is not None
    assert first.global_scale.tolist() == [float(total), 1.0]
    assert second.global_scale.tolist() == [1.0, 1.0, 1.0]


def test_a_list_without_memory_has_the_same_shapes() -> None:
    real = pack_rows(weights(), DTYPES)
    meta = pack_rows([weight.to("meta") for weight in weights()], DTYPES)
    assert meta.offsets == real.offsets
    for found, expected in zip(meta.launches, real.launches, strict=True):
        assert found.shape == expected.shape
        assert found.table.shape == expected.table.shape
        assert found.global_scale.shape == expected.global_scale.shape
        for part, other in zip(found.parts, expected.parts, strict=True):
            assert part.data.is_meta
            assert part.data.shape == other.data.shape
            scales = [p.block_scale for p in (part, other)]
            shapes = [None if scale is None else scale.shape for scale in scales]
            assert shapes[0] == shapes[1]


def test_lists_that_do_not_fit_together_are_refused() -> None:
    narrow = QuantTensor.dense(torch.zeros(8, 64).bfloat16())
    wide = QuantTensor.dense(torch.zeros(8, 128).bfloat16())
    with pytest.raises(ValueError, match="^weights: found shapes .*matrices of one K"):
        pack_rows([narrow, wide], [None, None])
    with pytest.raises(ValueError, match="^weights: found shapes .*1 to 8 matrices"):
        pack_rows([narrow] * 9, [None] * 9)
    with pytest.raises(ValueError, match="^out_dtypes: found"):
        pack_rows([narrow], [torch.float16])
    with pytest.raises(ValueError, match="^rows: found RowList, expected the PackedRows"):
        packed_rows(dequantized_rows([narrow], [None]))
    assert isinstance(packed_rows(pack_rows([narrow], [None])), PackedRows)
