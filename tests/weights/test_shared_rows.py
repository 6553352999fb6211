"""Rows of a packed weight mean what they mean in the whole, in its memory or in a copy."""

import pytest
import torch

from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, planned_quant_tensor
from dsv4.weights.shared_rows import on_device, rows_of
from tests.ops.linear.normal_weight import normal_weight

FORMATS = (QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16)
ROWS = 280


def packed(format: QuantFormat) -> PackedWeight:
    return pack_weight(normal_weight(format, ROWS, 128))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_have_the_values_of_the_whole(format: QuantFormat) -> None:
    whole = packed(format)
    for first, stop in ((0, 128), (128, 256), (128, ROWS), (256, ROWS), (0, ROWS)):
        part = rows_of(whole, first, stop)
        assert torch.equal(part.dequantize(), whole.dequantize()[first:stop])
        assert part.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
        assert part.power_of_two_scales == whole.power_of_two_scales


def test_shares_hold_as_many_bytes_as_the_whole() -> None:
    whole = packed(QuantFormat.BF16)
    parts = [rows_of(whole, first, stop) for first, stop in ((0, 128), (128, ROWS))]
    assert sum(part.nbytes for part in parts) == whole.nbytes


@pytest.mark.parametrize(
    ("first", "stop"), [(64, 256), (0, 200), (0, 192), (256, 256), (128, 384), (-128, 0)]
)
def test_parted_units_are_refused(first: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"rows: found {first} to {stop}, expected multiples"):
        rows_of(packed(QuantFormat.BF16), first, stop)


def test_every_part_goes_to_the_device() -> None:
    copy = on_device(packed(QuantFormat.NVFP4), torch.device("meta"))
    parts = (copy.data, copy.block_scale, copy.global_scale)
    assert [part is not None and part.is_meta for part in parts] == [True] * 3


def test_a_weight_without_memory_stays_without() -> None:
    whole = pack_weight(planned_quant_tensor(QuantFormat.FP8_BLOCK128, (256, 128)))
    copy = on_device(rows_of(whole, 128, 256), torch.device("cuda", 3))
    assert copy.data.is_meta
    assert copy.data.untyped_storage()._cdata != whole.data.untyped_storage()._cdata
    assert copy.shape == (128, 128)
