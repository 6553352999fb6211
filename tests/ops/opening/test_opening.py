"""The opening of a step: positions, the position that moves on, the embedding in every stream."""

import pytest
import torch

from dsv4.ops import TORCH, Ops
from tests.ops.cases import normal

NONE = 0


@pytest.mark.parametrize("start", [0, 122, (1 << 31) - 2])
@pytest.mark.parametrize("tokens", [1, 8, 700])
def test_positions_follow_the_position_which_moves_on(ops: Ops, tokens: int, start: int) -> None:
    position_1 = torch.tensor([start])
    rejected_1 = torch.tensor([NONE])
    positions_T = ops.next_positions(position_1, rejected_1, tokens)
    assert positions_T.dtype == torch.int64
    assert positions_T.tolist() == list(range(start, start + tokens))
    assert (position_1.tolist(), rejected_1.tolist()) == ([start + tokens], [0])


@pytest.mark.parametrize("rejected", [1, 3, 7])
@pytest.mark.parametrize("tokens", [1, 8, 700])
def test_rejected_tokens_are_taken_back_once(ops: Ops, tokens: int, rejected: int) -> None:
    """The device alone knows how many; the step after the next begins where the next one ended."""
    position_1 = torch.tensor([130])
    rejected_1 = torch.tensor([rejected])
    start = 130 - rejected
    positions_T = ops.next_positions(position_1, rejected_1, tokens)
    assert positions_T.tolist() == list(range(start, start + tokens))
    assert (position_1.tolist(), rejected_1.tolist()) == ([start + tokens], [0])
    assert ops.next_positions(position_1, rejected_1, 1).tolist() == [start + tokens]


@pytest.mark.parametrize("width", [7168, 520, 12, 7])
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("rejected", [NONE, 2])
def test_every_stream_is_the_row_of_the_token(
    ops: Ops, tokens: int, width: int, streams: int, rejected: int
) -> None:
    table_VE = normal(50, width, seed=1).bfloat16()
    tokens_T = torch.randint(50, (tokens,))
    tokens_T[0] = 49
    tokens_T[-1] = 0
    position_1 = torch.tensor([9 + rejected])
    rejected_1 = torch.tensor([rejected])
    positions_T, streams_TME = ops.embed(
        tokens_T, position_1, rejected_1, table_VE, streams, torch.bfloat16
    )
    assert streams_TME.dtype == torch.bfloat16
    assert list(streams_TME.shape) == [tokens, streams, width]
    for t, token in enumerate(tokens_T.tolist()):
        assert torch.equal(streams_TME[t], table_VE[token].expand(streams, width))
    assert positions_T.tolist() == list(range(9, 9 + tokens))
    assert (position_1.tolist(), rejected_1.tolist()) == ([9 + tokens], [0])


def test_a_table_of_another_dtype_is_rounded(ops: Ops) -> None:
    table_VE = normal(20, 16, seed=2).float()
    tokens_T = torch.tensor([3, 19])
    position_1 = torch.tensor([0])
    rejected_1 = torch.tensor([NONE])
    _, streams_TME = ops.embed(tokens_T, position_1, rejected_1, table_VE, 4, torch.bfloat16)
    assert torch.equal(streams_TME[:, 2], table_VE[tokens_T].bfloat16())


@pytest.mark.parametrize("token", [-1, 50])
def test_an_id_outside_the_table_is_refused(token: int) -> None:
    tokens_T = torch.tensor([token])
    table_VE = torch.zeros(50, 8)
    with pytest.raises(IndexError):
        TORCH.embed(tokens_T, torch.tensor([0]), torch.tensor([NONE]), table_VE, 4, torch.float32)
