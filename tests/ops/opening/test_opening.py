"""The opening of a step: positions, the position that moves on, and the embedding in every stream."""

import pytest
import torch

from dsv4.ops import TORCH, Ops
from tests.ops.cases import normal


@pytest.mark.parametrize("start", [0, 122, (1 << 31) - 2])
@pytest.mark.parametrize("tokens", [1, 8, 700])
def test_positions_follow_the_position_which_moves_on(ops: Ops, tokens: int, start: int) -> None:
    position_1 = torch.tensor([start])
    positions_T = ops.next_positions(position_1, tokens)
    assert positions_T.dtype == torch.int64
    assert positions_T.tolist() == list(range(start, start + tokens))
    assert position_1.tolist() == [start + tokens]


@pytest.mark.parametrize("width", [7168, 520, 12, 7])
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("streams", [1, 4])
def test_every_stream_is_the_row_of_the_token(ops: Ops, tokens: int, width: int, streams: int) -> None:
    table_VE = normal(50, width, seed=1).bfloat16()
    tokens_T = torch.randint(50, (tokens,))
    tokens_T[0], tokens_T[-1] = 49, 0
    position_1 = torch.tensor([9])
    positions_T, streams_TME = ops.embed(tokens_T, position_1, table_VE, streams, torch.bfloat16)
    assert (streams_TME.dtype, list(streams_TME.shape)) == (torch.bfloat16, [tokens, streams, width])
    for t, token in enumerate(tokens_T.tolist()):
        assert torch.equal(streams_TME[t], table_VE[token].expand(streams, width))
    assert positions_T.tolist() == list(range(9, 9 + tokens))
    assert position_1.tolist() == [9 + tokens]


def test_a_table_of_another_dtype_is_rounded(ops: Ops) -> None:
    table_VE, tokens_T, position_1 = normal(20, 16, seed=2).float(), torch.tensor([3, 19]), torch.tensor([0])
    _, streams_TME = ops.embed(tokens_T, position_1, table_VE, 4, torch.bfloat16)
    assert torch.equal(streams_TME[:, 2], table_VE[tokens_T].bfloat16())


def test_no_tokens_leave_the_position(ops: Ops) -> None:
    position_1, none = torch.tensor([5]), torch.empty(0, dtype=torch.int64)
    positions_T, streams_TME = ops.embed(none, position_1, normal(4, 8, seed=3).bfloat16(), 4, torch.bfloat16)
    assert (list(positions_T.shape), list(streams_TME.shape)) == ([0], [0, 4, 8])
    assert (ops.next_positions(position_1, 0).tolist(), position_1.tolist()) == ([], [5])


@pytest.mark.parametrize("token", [-1, 50])
def test_an_id_outside_the_table_is_refused(token: int) -> None:
    with pytest.raises(IndexError):
        TORCH.embed(torch.tensor([token]), torch.tensor([0]), torch.zeros(50, 8), 4, torch.float32)
