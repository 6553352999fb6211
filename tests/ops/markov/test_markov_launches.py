"""What the launcher of the Markov head records."""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.ops.markov.cuda import markov_logits
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, planned_quant_tensor
from tests.ops.recorded import functions, launches, meta

ONE = meta(1, dtype=torch.int64)


def record(vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    w2 = pack_weight(planned_quant_tensor(QuantFormat.BF16, (vocabulary, 256)))
    base_V = meta(vocabulary, dtype=torch.float32)
    table = meta(vocabulary, 256, dtype=dtype)
    return launches(markov_logits, base_V, ONE, table, w2, tokens=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_its_product_and_the_sum(dtype: torch.dtype) -> None:
    found = record(129_280, dtype)
    assert functions(found) == ["markov_row", "decode_linear", "markov_add"]
    assert found[0].shape.kernel.defines == (("FLOAT_TABLE", int(dtype == torch.float32)),)
    assert found[2].shape.grid == (505, 1, 1)


@pytest.mark.parametrize("shape", [(73, 256), (105, 256), (89, 128)])
def test_a_product_of_another_width_than_the_logits_is_refused(shape: tuple[int, int]) -> None:
    w2 = pack_weight(planned_quant_tensor(QuantFormat.BF16, shape))
    arguments = meta(89, dtype=torch.float32), ONE, meta(89, 256), w2
    with pytest.raises(ValueError, match=r"w2: found \[.*\], expected \[89, 256\] as w1_VR"):
        launches(markov_logits, *arguments, tokens=5)


def test_another_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w1_VR: found torch.float16, expected"):
        record(89, torch.float16)
