"""The logits of a head whose rows several devices share are those of the whole head."""

import torch

from dsv4.ops.linear import linear
from dsv4.ops.shared_head import fetch, logit_columns
from dsv4.weights.cut import ROWS, Cut, cut_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.cases import normal
from tests.ops.linear.normal_weight import normal_weight


def test_columns_of_all_shares_are_the_product_with_the_whole() -> None:
    hidden_TE = normal(3, 64, seed=1).bfloat16()
    whole = normal_weight(QuantFormat.BF16, 320, 64)
    logits_TV = torch.full((3, 320), torch.nan)
    for first, stop in ((128, 320), (0, 128)):
        rows = cut_weight(whole, Cut(ROWS, first, stop))
        assert isinstance(rows, QuantTensor)
        logit_columns(fetch(hidden_TE), rows, logits_TV, first)
    assert torch.equal(logits_TV, linear(hidden_TE, whole, torch.float32))


def test_what_is_fetched_is_a_copy() -> None:
    rows = normal(2, 8, seed=1)
    fetched = fetch(rows)
    assert torch.equal(fetched, rows)
    assert fetched.data_ptr() != rows.data_ptr()
