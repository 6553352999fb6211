"""The rows of a draft module on a GPU: bit for bit those of the torch ops."""

import pytest
import torch

from dsv4.ops import draft_rows as reference
from dsv4.ops.draft_rows import Block, cuda
from dsv4.ops.immediate import immediately

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def place(position: int, rejected: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([position], device="cuda"), torch.tensor([rejected], device="cuda")


def test_rows_begin_as_by_the_torch_op() -> None:
    rows_place = place(-9, -9)
    tokens_B = torch.zeros(5, dtype=torch.int64, device="cuda")
    block = Block(tokens_B, torch.tensor([7], device="cuda"), 128799)
    immediately(cuda.begin_rows)(place(20, 3), -1, rows_place, block, tokens=5)
    assert [int(tensor) for tensor in rows_place] == [16, 0]
    assert tokens_B.tolist() == [7, *[128799] * 4]


@pytest.mark.parametrize("first", [-1, 0, 18, 19, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_streams_move_as_by_the_torch_op(first: int, tokens: int) -> None:
    ring_SME = torch.randn((20, 4, 4096), device="cuda").to(BF16)
    streams_TME = torch.randn((tokens, 4, 4096), device="cuda").to(BF16)
    first_1 = torch.tensor([first], device="cuda")
    expected_ring = ring_SME.clone()
    expected = reference.shift_streams(streams_TME, expected_ring, first_1)
    found = immediately(cuda.shift_streams)(streams_TME, ring_SME, first_1)
    assert torch.equal(found, expected)
    assert torch.equal(ring_SME, expected_ring)
    recalled = immediately(cuda.recall_streams)(ring_SME, first_1, tokens=1)
    assert torch.equal(recalled, reference.recall_streams(ring_SME, first_1))


def test_mixing_is_that_of_the_torch_op() -> None:
    positions_T = torch.tensor([-1, 0, 1, 7], device="cuda")
    found = immediately(cuda.token_mixing)(positions_T, 4)
    for one, other in zip(found, reference.token_mixing(positions_T, 4), strict=True):
        assert torch.equal(one, other)
