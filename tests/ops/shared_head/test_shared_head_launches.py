"""What devices record that share the rows of a head."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.shared_head.cuda import fetch, logit_columns
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, planned_quant_tensor
from dsv4.weights.shared_rows import rows_of
from tests.ops.recorded import functions, launches, meta, numbers

F32 = torch.float32
HEAD = pack_weight(planned_quant_tensor(QuantFormat.BF16, (1024, 256)))


def rows(first: int, stop: int) -> PackedWeight:
    return rows_of(HEAD, first, stop)


def multiplied(recording: Recording, logits_TV: Tensor, first: int, stop: int) -> None:
    hidden_TE = meta(logits_TV.shape[0], 256)
    logit_columns(recording, hidden_TE, rows(first, stop), logits_TV, first)


def test_a_device_fetches_rows_and_stores_columns() -> None:
    (found,) = launches(fetch, meta(5, 256), tokens=5)
    assert functions([found]) == ["fetch"]
    assert numbers(found) == {"count": 160}
    assert (found.shape.grid, found.shape.threads) == ((1, 1, 1), 256)
    (found,) = launches(multiplied, meta(3, 1024, dtype=F32), 384, 1024, tokens=3)
    assert functions([found]) == ["decode_linear"]
    assert (found.arguments["rows"], found.arguments["tiles0"]) == (1024, 40)
    y = found.arguments["y"]
    assert isinstance(y, Tensor)
    assert (y.storage_offset(), y.stride(0)) == (384, 1024)


def test_shares_multiply_as_many_rows_as_they_have() -> None:
    """Their warps cut K as those of a product of as many rows, whatever the width of the logits."""
    (part,) = launches(multiplied, meta(1, 1024, dtype=F32), 384, 640, tokens=1)
    (other,) = launches(multiplied, meta(1, 1024, dtype=F32), 0, 256, tokens=1)
    assert part.shape == other.shape


def test_memory_of_another_device_is_reached_where_it_is_meant() -> None:
    """``launches`` records for a GPU; tensors of a CPU are no memory of it."""
    far = torch.zeros(2, 256, dtype=torch.bfloat16)
    assert functions(launches(fetch, far, tokens=2)) == ["fetch"]
    logits_TV = torch.zeros(2, 1024)
    assert functions(launches(multiplied, logits_TV, 0, 1024, tokens=2)) == ["decode_linear"]


def test_other_tensors_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rows: found strides \(1, 5\), expected rows without gaps"
    ):
        launches(fetch, meta(256, 5).T, tokens=5)
    with pytest.raises(ValueError, match="rows: found 26 bytes, expected a multiple of 16"):
        launches(fetch, meta(1, 13), tokens=1)
    with pytest.raises(ValueError, match=r"logits_TV: found torch\.bfloat16"):
        launches(multiplied, meta(1, 1024), 0, 256, tokens=1)
    with pytest.raises(ValueError, match="y_TN: found columns 128 to 1024 of 1000, expected some"):
        launches(multiplied, meta(1, 1000, dtype=F32), 128, 1024, tokens=1)
    with pytest.raises(ValueError, match="y_TN: found columns 0 to 128 of 1000, expected some"):
        launches(multiplied, meta(1, 1000, dtype=F32), 0, 128, tokens=1)
