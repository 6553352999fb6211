"""The opening's kernel: the bits of the torch op, replays, and an id outside the table."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.ops import TORCH
from tests.ops.cases import normal
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

OUTSIDE = """
import torch
from dsv4.ops.tables import CUDA
tokens_T, position_1 = torch.tensor([TOKEN], device="cuda"), torch.tensor([0], device="cuda")
CUDA.embed(tokens_T, position_1, torch.zeros(50, 8, dtype=torch.bfloat16, device="cuda"), 4, torch.bfloat16)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("width", "offset"), [(7168, 0), (4096, 3), (7, 0)])
@pytest.mark.parametrize("tokens", [1, 8, 2049])
def test_bits_are_those_of_the_torch_op(tokens: int, width: int, offset: int) -> None:
    from dsv4.ops.tables import CUDA

    values = normal(1000 * width + offset, seed=1).bfloat16().cuda()
    table_VE, tokens_T = values[offset:].view(1000, width), torch.randint(1000, (tokens,), device="cuda")
    position_1 = torch.tensor([130], device="cuda")
    poison(64 << 20)
    found = CUDA.embed(tokens_T, position_1, table_VE, 4, torch.bfloat16)
    expected = TORCH.embed(tokens_T, torch.tensor([130], device="cuda"), table_VE, 4, torch.bfloat16)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert int(position_1) == 130 + tokens


def test_replays_move_the_position_on() -> None:
    from dsv4.ops.tables import CUDA

    table_VE, tokens_T = normal(50, 4096, seed=2).bfloat16().cuda(), torch.tensor([49, 0], device="cuda")
    position_1 = torch.tensor([7], device="cuda")
    assert_replay_is_eager(lambda: CUDA.embed(tokens_T, position_1, table_VE, 4, torch.bfloat16), (position_1,))
    assert_replay_is_eager(lambda: CUDA.next_positions(position_1, 2), (position_1,))
    assert_no_synchronisation(lambda: CUDA.embed(tokens_T, position_1, table_VE, 4, torch.bfloat16))


@pytest.mark.parametrize("token", [-1, 50, 1 << 40])
def test_an_id_outside_the_table_is_a_fault_and_no_memory_of_others(token: int) -> None:
    command = [sys.executable, "-c", OUTSIDE.replace("TOKEN", str(token))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=120)
    assert result.returncode != 0
    assert "unspecified launch failure" in result.stderr, result.stderr


def test_other_dtypes_are_refused() -> None:
    from dsv4.ops.tables import CUDA

    tokens_T, position_1 = torch.tensor([1], device="cuda"), torch.tensor([0], device="cuda")
    with pytest.raises(ValueError, match=r"dtype: found torch.float32, expected torch.bfloat16"):
        CUDA.embed(tokens_T, position_1, torch.zeros(4, 8, device="cuda"), 4, torch.float32)
    with pytest.raises(ValueError, match=r"table_VE: found torch.float32 .*, expected torch.bfloat16"):
        CUDA.embed(tokens_T, position_1, torch.zeros(4, 8, device="cuda"), 4, torch.bfloat16)
