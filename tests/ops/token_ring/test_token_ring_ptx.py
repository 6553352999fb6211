"""The store of a token, executed on the CPU: what the torch op stores."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import token_ring as reference
from dsv4.ops.token_ring.cuda import store_token
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

FAULTS = {
    "NaN is not asked for": SourceEdit("token_ring.cu", "if (met_nan)", "if (false)"),
    "the next step gets no token": SourceEdit("token_ring.cu", "sampled < 0 ? 0 : ", ""),
}


def memory(token: int, position: int, nan: int) -> tuple[Tensor, ...]:
    """Token, position, the next step's token, ring, and whether NaN was met."""
    next_1 = torch.tensor([-7])
    ring_R = torch.full((6,), -7)
    return torch.tensor(token), torch.tensor([position]), next_1, ring_R, torch.tensor([nan]).int()


def differs(token: int, position: int, nan: int, edit: SourceEdit | None = None) -> bool:
    found, expected = memory(token, position, nan), memory(token, position, nan)
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), 1)
    store_token(recording, *found)
    execute(recording, 1, edit)
    reference.store_token(*expected)
    return not all(map(torch.equal, found, expected))


@pytest.mark.parametrize("position", [0, 5, 6, (1 << 40) + 3])
def test_a_token_is_stored_where_the_host_reads_it(position: int) -> None:
    for token in (0, 129_279, -1):
        for nan in (0, 1):
            assert not differs(token, position, nan)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert differs(5, 3, 1, FAULTS[fault])
