"""How two values are compared: worst token, lengths, NaN, sets of ids, and any slices."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.validate.agreement import Agreement, RowComparison, agreement, align, table
from tests.validate.trace_files import random


def chosen(found: list[list[int]], reference: list[list[int]]) -> Agreement:
    comparison = RowComparison(0.9999)
    comparison.add_chosen(torch.tensor(found), torch.tensor(reference))
    return comparison.result("", "", chosen=True)


def test_equal_opposite_and_nan_values() -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    same = agreement("", "", a, a)
    assert same.cosine == pytest.approx(1.0)
    assert same.passes
    opposite = agreement("", "", torch.stack((a[0], -a[1])), a)
    assert opposite.cosine == pytest.approx((5 - 25) / 30)
    assert (opposite.worst_token, opposite.worst_at) == (pytest.approx(-1.0), 1)
    assert opposite.first_under == 1
    assert opposite.relative_error == pytest.approx(2.0)
    nan = agreement("", "", torch.stack((a[0], a[1] * math.nan)), a)
    assert math.isnan(nan.cosine)
    assert math.isnan(nan.worst_token)
    assert math.isnan(nan.relative_error or 0)
    assert (nan.worst_at, nan.first_under) == (1, 1)


def test_a_number_for_every_token_is_a_row_of_its_own() -> None:
    found = agreement("", "", torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, -2.0, 0.5]))
    assert (found.worst_token, found.worst_at, found.first_under) == (-1.0, 1, 1)


def test_nan_stays_the_worst_token_whatever_follows() -> None:
    one = torch.ones(1, 2)
    comparison = RowComparison(0.999)
    for row in (one, one * math.nan, -one, one):
        comparison.add(row, one)
    found = comparison.result("", "")
    assert math.isnan(found.worst_token)
    assert math.isnan(found.relative_error or 0)
    assert (found.worst_at, found.first_under) == (1, 1)


def test_values_count_by_their_lengths_whatever_their_signs() -> None:
    one = torch.ones(1, 2)
    assert agreement("", "", one, -one).cosine == agreement("", "", -one, one).cosine == -1.0
    comparison = RowComparison(0.999)
    comparison.add(one, one)
    comparison.add(one, -one)
    assert comparison.result("", "").cosine == 0.0


def test_one_large_token_does_not_hide_the_others() -> None:
    a = random(512, 4, 64)
    b = random(512, 4, 64, seed=1)
    b[0] = a[0]
    for side in (a, b):
        side[0] *= 3000
    found = agreement("", "", a, b)
    assert found.cosine > 0.9999
    assert found.worst_token < 0.5
    assert not found.passes
    assert found.first_under == 1


def test_another_length_is_another_value() -> None:
    a = random(3, 8)
    b = a.clone()
    b[2] *= 1.5
    found = agreement("", "", a, b)
    assert found.worst_token == pytest.approx(2 * 1.5 / (1 + 1.5**2))
    assert found.first_under == 2
    assert agreement("", "", a, a * 1.01).passes


@pytest.mark.parametrize("scale", [1e-200, 1e-310, 1e200])
def test_values_whose_squares_are_no_numbers_of_float64_are_compared(scale: float) -> None:
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]).double()
    b = torch.tensor([[4.0, 3.0], [0.0, 1.0], [0.0, 0.0]]).double()
    found = agreement("", "", a * scale, b * scale)
    assert found.cosine == pytest.approx(24 / 26)
    assert (found.worst_token, found.worst_at, found.first_under) == (0.0, 1, 0)
    assert agreement("", "", a * scale, a * scale).cosine == 1.0
    alone = RowComparison(0.999)
    for row in (1, 2, 0):
        alone.add(a[row : row + 1] * scale, b[row : row + 1] * scale)
    assert alone.result("", "").cosine == pytest.approx(24 / 26)


def test_slices_of_other_magnitudes_are_added() -> None:
    a = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for scales in ((1e200, 1e-200), (1e-200, 1e200)):
        comparison = RowComparison(0.999)
        for scale in scales:
            comparison.add(scale * a, scale * a if scale > 1 else scale * a.flip(1))
        assert comparison.result("", "").cosine == 1.0


def test_the_error_is_that_of_the_largest_difference_of_either_sign() -> None:
    reference = torch.tensor([[0.125, -0.5], [0.25, 0.25]])
    assert agreement("", "", reference - 0.125, reference).relative_error == 0.25
    assert agreement("", "", reference + 0.125, reference).relative_error == 0.25


def test_values_that_cannot_be_computed_with_are_compared() -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = agreement("", "", a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))
    assert found == agreement("", "", a, b)


def test_small_values_beside_large_ones_are_compared() -> None:
    a = torch.tensor([[1.0, 0.0], [1e-200, 0.0]], dtype=torch.float64)
    found = agreement("", "", a, torch.stack((a[0], a[1].flip(0))))
    assert found.cosine == pytest.approx(1.0)
    assert (found.worst_token, found.worst_at) == (0.0, 1)


def test_equal_choices_are_exactly_equal() -> None:
    for tokens in range(1, 9):
        assert chosen([[1, 2]] * tokens, [[2, 1]] * tokens).cosine == 1.0


def test_zeros_agree_with_zeros_only() -> None:
    zeros = torch.zeros(2, 3)
    ones = torch.ones(2, 3)
    for a, b, expected in ((zeros, zeros, 1.0), (zeros, ones, 0.0), (ones, zeros, 0.0)):
        found = agreement("", "", a, b)
        assert found.worst_token == found.cosine == expected
        # Without a reference there is nothing that an error is relative to.
        assert found.relative_error == float((a - b).abs().max())
    nothing = agreement("", "", torch.zeros(0, 3), torch.zeros(0, 3))
    assert nothing.passes
    assert nothing.worst_at is None


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_slices_say_what_the_whole_says(step: int) -> None:
    a = random(7, 5)
    b = a + 0.1 * random(7, 5, seed=1)
    comparison = RowComparison(0.99)
    for start in range(0, 7, step):
        comparison.add(a[start : start + step], b[start : start + step])
    whole = agreement("", "", a, b, 0.99)
    found = comparison.result("", "")
    assert found.cosine == pytest.approx(whole.cosine)
    assert found.worst_token == pytest.approx(whole.worst_token)
    assert (found.worst_at, found.first_under) == (whole.worst_at, whole.first_under)
    assert found.relative_error == whole.relative_error


def test_ids_are_sets() -> None:
    assert chosen([[3, 1, -1]], [[1, 3]]).worst_token == 1.0
    assert chosen([[-1, -1]], [[-1]]).worst_token == 1.0
    half = chosen([[1, 2], [1, 2], [5, -1]], [[2, 1], [2, 3], [5, -1]])
    assert (half.worst_token, half.worst_at, half.first_under) == (0.5, 1, 1)
    assert half.cosine == pytest.approx(4 / 5)
    assert half.relative_error is None
    assert chosen([[1]], [[-1]]).worst_token == 0.0


def test_a_share_of_exactly_the_threshold_passes() -> None:
    comparison = RowComparison(0.9)
    comparison.add_chosen(torch.arange(10)[None], torch.arange(1, 11)[None])
    found = comparison.result("", "", chosen=True)
    assert (found.worst_token, found.first_under) == (0.9, None)


def test_an_id_given_twice_counts_once() -> None:
    assert chosen([[3, 3]], [[3, 4]]).worst_token == 0.5
    assert chosen([[3, 4]], [[3, 3]]).worst_token == 0.5
    assert chosen([[1, 3, 3]], [[1, 3, 4]]).worst_token == pytest.approx(2 / 3)


def test_values_are_aligned_by_id() -> None:
    ids = torch.tensor([[4, 2, -1], [0, 1, 2]])
    others = torch.tensor([[2, 4], [7, 1]])
    none = -math.inf
    a, b, compared = align(
        torch.tensor([[0.4, 0.2, none], [1.0, 1.1, 1.2]]),
        ids,
        torch.tensor([[20.0, 40.0], [70.0, 11.0]]),
        others,
    )
    rounded: Tensor = a.float()
    assert rounded.tolist() == torch.tensor([[0.4, 0.2, 0.0], [0.0, 1.1, 0.0]]).tolist()
    assert b.tolist() == [[40.0, 20.0, 0.0], [0.0, 11.0, 0.0]]
    assert compared.tolist() == [True, True]
    no_entries = torch.zeros(2, 0)
    a, b, compared = align(no_entries, no_entries.long(), no_entries, no_entries.long())
    assert (a.shape, b.shape, compared.tolist()) == ((2, 0), (2, 0), [False, False])
    a, b, compared = align(torch.ones(2, 2), others, no_entries, no_entries.long())
    assert (a.tolist(), b.tolist()) == ([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2)
    assert compared.tolist() == [False, False]


def test_values_without_a_shared_id_have_no_number() -> None:
    ids = torch.tensor([[4, 2], [0, 1], [5, -1]])
    values = torch.tensor([[0.4, 0.2], [1.0, 1.1], [math.nan, 2.0]])
    comparison = RowComparison(0.999)
    comparison.add(*align(values[:1], ids[:1], values[:1], ids[:1] + 5))
    nothing = comparison.result("layers.2.router.weights", "HCA")
    assert nothing.worst_at is None
    assert table([nothing]).endswith("no rows")
    comparison.add(*align(values[1:2], ids[1:2], 0.5 * values[1:2], ids[1:2]))
    comparison.add(*align(values[2:], ids[2:], values[2:], -ids[2:]))
    found = comparison.result("", "")
    assert (found.worst_at, found.first_under) == (1, 1)
    assert found.worst_token == pytest.approx(0.8)


def test_a_factor_that_leaves_an_error_of_its_size_is_none() -> None:
    reference = torch.tensor([[30.0, 40.0], [1.0, 1.0]])
    assert agreement("", "", 2 * reference, reference).factor == pytest.approx(2)
    assert agreement("", "", 1.01 * reference, reference).factor is None
    apart = reference + torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    found = agreement("", "", apart, reference)
    assert not found.passes
    assert found.factor is None


def test_a_value_without_rows_has_no_numbers_in_the_table() -> None:
    nothing = agreement("layers.2.attn.compressed", "HCA", torch.zeros(0, 3), torch.zeros(0, 3))
    assert nothing.passes
    assert table([nothing]).splitlines()[1].split() == [nothing.name, "HCA", "no", "rows"]


def test_the_table_marks_what_fails_and_from_where() -> None:
    rows = [
        Agreement("layers.0.attn.q", "SWA", 1.0, 0.99995, 3, 1e-4, None, 0, 4, None),
        Agreement("layers.0.router.experts", "SWA", 0.5, 0.0, 2, None, 1, 3, 4, None),
    ]
    head, good, bad = table(rows).splitlines()
    assert "worst token" in head
    assert good.split() == ["layers.0.attn.q", "SWA", "1.00000000", "0.99995000", "3", "1.00e-04"]
    assert bad.endswith("under the threshold from 1: 3 of 4")
