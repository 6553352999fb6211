"""The opening's kernel: the bits of the torch op, replays, and an id outside the table."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.ops import TORCH
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.opening.cuda import embed, next_positions
from tests.ops.cases import normal
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

OUTSIDE = """
import torch
from dsv4.ops.immediate import immediately
from dsv4.ops.opening.cuda import embed
tokens_T, position_1 = torch.tensor([TOKEN], device="cuda"), torch.tensor([0], device="cuda")
table_VE = torch.zeros(50, 8, dtype=torch.bfloat16, device="cuda")
immediately(embed)(tokens_T, position_1, position_1.clone(), table_VE, 4, torch.bfloat16)
torch.cuda.synchronize()
"""


def one(value: int) -> Tensor:
    return torch.tensor([value], device="cuda")


@pytest.mark.parametrize(("width", "offset"), [(7168, 0), (4096, 3), (7, 0)])
@pytest.mark.parametrize("tokens", [1, 8, 2049])
@pytest.mark.parametrize("rejected", [0, 5])
def test_bits_are_those_of_the_torch_op(
    tokens: int, width: int, offset: int, rejected: int
) -> None:
    values = normal(1000 * width + offset, seed=1).bfloat16().cuda()
    table_VE = values[offset:].view(1000, width)
    tokens_T = torch.randint(1000, (tokens,), device="cuda")
    position_1 = one(130)
    rejected_1 = one(rejected)
    poison(64 << 20)
    found = immediately(embed)(tokens_T, position_1, rejected_1, table_VE, 4, torch.bfloat16)
    expected = TORCH.embed(tokens_T, one(130), one(rejected), table_VE, 4, torch.bfloat16)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert (int(position_1), int(rejected_1)) == (130 - rejected + tokens, 0)


@pytest.mark.parametrize("tokens", [1, 2, 8, 128, 2049])
def test_the_other_devices_place_the_tokens_alike(tokens: int) -> None:
    for rejected in (0, 7):
        position_1 = one(130)
        rejected_1 = one(rejected)
        prepared = PreparedOp(next_positions, position_1, rejected_1, tokens, tokens=tokens)
        start = 130 - rejected
        assert prepared.run().tolist() == list(range(start, start + tokens))
        assert (int(position_1), int(rejected_1)) == (start + tokens, 0)


def test_a_recording_of_a_long_chunk_serves_shorter_ones() -> None:
    table_VE = normal(1000, 4096, seed=3).bfloat16().cuda()
    tokens_T = torch.randint(1000, (700,), device="cuda")
    position_1 = one(7)
    rejected_1 = one(2)
    prepared = PreparedOp(embed, tokens_T, position_1, rejected_1, table_VE, 4, torch.bfloat16)
    start = 5
    for tokens in (9, 700, 100):
        positions_T, streams_TME = prepared.run(tokens)
        assert positions_T[:tokens].tolist() == list(range(start, start + tokens))
        expected = table_VE[tokens_T[:tokens]].unsqueeze(1).expand(-1, 4, -1)
        assert torch.equal(streams_TME[:tokens], expected)
        start += tokens
        assert int(position_1) == start


def test_replays_move_the_position_on() -> None:
    table_VE = normal(50, 4096, seed=2).bfloat16().cuda()
    tokens_T = torch.tensor([49, 0], device="cuda")
    position_1 = one(7)
    rejected_1 = one(3)
    place = position_1, rejected_1
    embedding = PreparedOp(embed, tokens_T, *place, table_VE, 4, torch.bfloat16)
    assert_replay_is_eager(embedding.run, place)
    assert_replay_is_eager(PreparedOp(next_positions, *place, 2, tokens=2).run, place)
    assert_no_synchronisation(embedding.run)


@pytest.mark.parametrize("token", [-1, 50, 1 << 40])
def test_an_id_outside_the_table_is_a_fault_and_no_memory_of_others(token: int) -> None:
    command = [sys.executable, "-c", OUTSIDE.replace("TOKEN", str(token))]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert result.returncode != 0
    assert "unspecified launch failure" in result.stderr, result.stderr
