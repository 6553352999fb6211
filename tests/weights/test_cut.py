"""Parts of weights: they mean what they mean in the whole, bit for bit, or they are refused."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dsv4.weights.cut import COLUMNS, ROWS, Cut, part_cuts
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ranks.cut_weights import cut_weight

QUANTISED = (QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128)


def weight_of(format: QuantFormat, *shape: int) -> QuantTensor:
    """Every block has a scale of its own, so that a misplaced one shows."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values *= torch.arange(1, 1 + values[..., 0].numel()).view(*shape[:-1], 1)
    values *= torch.logspace(0, 3, shape[-1])
    if format in QUANTISED:
        return quantize(values, format)
    return QuantTensor.dense(values.bfloat16() if format is QuantFormat.BF16 else values)


WHOLE = {format: weight_of(format, 2, 416, 320) for format in QuantFormat}


def is_whole_blocks(format: QuantFormat, cut: Cut) -> bool:
    """The rule, in words of blocks: a part is cut where blocks begin, or out of one block."""
    if format is QuantFormat.FP8_BLOCK128:
        return cut.first % 128 == 0 or len({at // 128 for at in range(cut.first, cut.stop)}) == 1
    unit = {QuantFormat.NVFP4: 16, QuantFormat.MXFP4: 32}.get(format, 1)
    return cut.dimension == ROWS or (cut.first % unit == 0 and cut.stop % unit == 0)


@given(
    format=st.sampled_from(QuantFormat),
    dimension=st.sampled_from([ROWS, COLUMNS]),
    unit=st.sampled_from([1, 16, 32, 64, 128]),
    first=st.integers(0, 400),
    size=st.integers(1, 416),
)
@example(format=QuantFormat.NVFP4, dimension=COLUMNS, unit=1, first=8, size=416)
def test_a_part_has_the_values_of_the_whole_or_is_refused(
    format: QuantFormat, dimension: int, unit: int, first: int, size: int
) -> None:
    whole = WHOLE[format]
    length = whole.shape[dimension]
    first = min(first, length - 1) // unit * unit
    cut = Cut(dimension, first, min(first + -(-size // unit) * unit, length))
    if not is_whole_blocks(format, cut):
        with pytest.raises(ValueError, match=r"^cut: found .* weight, expected "):
            cut_weight(whole, cut)
        return
    part = cut_weight(whole, cut)
    assert isinstance(part, QuantTensor)
    expected = whole.dequantize().narrow(dimension, cut.first, cut.size)
    assert part.shape == tuple(expected.shape) == cut.shape(whole.shape)
    assert torch.equal(part.dequantize().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("format", [*QUANTISED, QuantFormat.BF16])
@pytest.mark.parametrize("dimension", [ROWS, COLUMNS])
def test_parts_are_packed_like_weights_of_their_own(format: QuantFormat, dimension: int) -> None:
    part = cut_weight(WHOLE[format], Cut(dimension, 128, 192))
    assert isinstance(part, QuantTensor)
    assert part.data.is_contiguous()
    assert torch.equal(pack_weight(part).dequantize(), part.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_plain_parameters_are_cut_too(dtype: torch.dtype) -> None:
    vector = torch.arange(12).to(dtype)
    part = cut_weight(vector, Cut(COLUMNS, 3, 6))
    assert isinstance(part, Tensor)
    assert (part.dtype, part.tolist()) == (dtype, [3, 4, 5])
    part.zero_()
    assert vector[3] == 3
    assert cut_weight(vector, None) is vector


def test_one_expert_is_cut_like_a_stack_of_them() -> None:
    whole = WHOLE[QuantFormat.NVFP4]
    cut = Cut(COLUMNS, 160, 320)
    stack, one = cut_weight(whole, cut), cut_weight(whole[1], cut)
    assert torch.equal(stack[1].dequantize(), one.dequantize())  # pyright: ignore[reportAttributeAccessIssue]


def test_the_parts_of_a_block_share_its_scale() -> None:
    cuts = part_cuts(QuantFormat.FP8_BLOCK128, Cut(ROWS, 64, 128))
    assert cuts == {
        "data": Cut(ROWS, 64, 128),
        "block_scale": Cut(ROWS, 0, 1),
        "global_scale": None,
    }


@pytest.mark.parametrize(("first", "stop"), [(-1, 4), (4, 4), (5, 4), (0, 13)])
def test_what_is_no_part_is_refused(first: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"^cut: found .*, expected a part of 0 to 12$"):
        cut_weight(torch.zeros(12), Cut(COLUMNS, first, stop))
