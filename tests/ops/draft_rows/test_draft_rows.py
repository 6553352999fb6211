"""The rows of a draft module: places, tokens, and streams of the positions before them."""

import torch

from dsv4.ops.draft_rows import (
    Block,
    begin_rows,
    recall_streams,
    shift_streams,
    stream_linear,
    token_mixing,
)
from dsv4.ops.hyper_connection import hc_post
from dsv4.ops.linear import RowList, linear_rows
from dsv4.weights.quant import QuantTensor
from tests.ops.cases import normal

SLOTS = 6


def test_rows_begin_where_what_is_rejected_says() -> None:
    rows_place = (torch.tensor([-9]), torch.tensor([-9]))
    tokens_B = torch.zeros(4, dtype=torch.int64)
    place = (torch.tensor([20]), torch.tensor([3]))
    begin_rows(place, -1, rows_place, Block(tokens_B, torch.tensor([7]), 99))
    assert [int(tensor) for tensor in rows_place] == [16, 0]
    assert tokens_B.tolist() == [7, 99, 99, 99]
    assert [int(tensor) for tensor in place] == [20, 3]


def test_streams_of_a_sequence_in_steps_are_those_before_each_token() -> None:
    """Steps of several lengths, some of whose tokens are taken back, from the first position on."""
    streams_NME = normal(30, 2, 4, seed=1)
    ring_SME = normal(SLOTS, 2, 4, seed=2)
    position = 0
    for tokens, kept in ((1, 1), (5, 2), (3, 3), (1, 1), (4, 1), (5, 5), (2, 2)):
        part = streams_NME[position : position + tokens].clone()
        part[kept:] += 1
        rows_TME = shift_streams(part, ring_SME, torch.tensor([position - 1]))
        if position:
            assert torch.equal(rows_TME[0], streams_NME[position - 1])
        assert torch.equal(rows_TME[1:], part[:-1])
        position += kept
        last_1 = torch.tensor([position - 1])
        assert torch.equal(recall_streams(ring_SME, last_1)[0], streams_NME[position - 1])


def test_a_token_s_part_is_added_to_every_stream_but_at_the_first_position() -> None:
    y_TE = normal(3, 8, seed=1)
    streams_TME = normal(3, 4, 8, seed=2)
    mixing = token_mixing(torch.tensor([-1, 0, 1]), 4)
    mixed_TME = hc_post(y_TE, streams_TME, *mixing)
    assert torch.equal(mixed_TME[:2], streams_TME[:2])
    torch.testing.assert_close(mixed_TME[2], streams_TME[2] + y_TE[2])


def test_every_stream_is_multiplied_by_itself() -> None:
    streams_TME = normal(3, 4, 8, seed=1)
    rows = RowList((QuantTensor.dense(normal(5, 8, seed=2)),), (None,))
    weight = 1 + 0.1 * normal(8, seed=3)
    found = stream_linear(streams_TME, rows, weight, 1e-6)
    for stream in range(4):
        (expected,) = linear_rows(streams_TME[:, stream], rows, weight, 1e-6)
        torch.testing.assert_close(found[:, stream], expected)
