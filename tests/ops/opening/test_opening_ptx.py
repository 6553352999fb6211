"""A step's opening, executed on the CPU: to the bit that of the torch op."""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import TORCH
from dsv4.ops.opening.cuda import embed, next_positions
from tests.ops.cases import normal
from tests.ops.executed import execute
from tests.ptx.faults import Trap
from tests.ptx.nvrtc import SourceEdit

CPU = torch.device("cpu")
VOCABULARY = 50
TOKENS = 3
START, REJECTED = (1 << 33) + 7, 5
FAULTS = {
    "rejected tokens count": SourceEdit("opening.cu", "*position - *rejected", "*position"),
    "they stay rejected": SourceEdit("opening.cu", ", *rejected = 0;", ";"),
    "one stream is left out": SourceEdit("opening.cu", "int m = 0;", "int m = 1;"),
}


def recording(most: int) -> Recording:
    return Recording(Target(CPU, "sm_90a", 132), most)


def assert_embedded(
    width: int,
    streams: int = 4,
    shift: int = 0,
    edit: SourceEdit | None = None,
) -> None:
    """Recorded for more tokens; ``shift``: of the table's first row."""
    most = TOKENS + 2
    values = normal(shift + VOCABULARY * width, seed=1, dtype=torch.bfloat16)
    table_VE = values[shift:].view(VOCABULARY, width)
    tokens_T = torch.tensor([VOCABULARY - 1, 0, 17, -9, -9])
    found, expected = (
        (torch.tensor([START]), torch.tensor([REJECTED])) for _ in ("kernel", "torch")
    )
    items = recording(most)
    positions_T, streams_TME = embed(items, tokens_T, *found, table_VE, streams, torch.bfloat16)
    real = execute(items, TOKENS, edit)
    wanted = TORCH.embed(tokens_T[:TOKENS], *expected, table_VE, streams, torch.bfloat16)
    assert torch.equal(real(positions_T)[:TOKENS], wanted[0])
    assert torch.equal(real(streams_TME)[:TOKENS], wanted[1])
    assert (real(positions_T)[TOKENS:] == -1).all()
    assert real(streams_TME)[TOKENS:].isnan().all()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("width", "shift"), [(2056, 0), (64, 0), (64, 3), (7, 0)])
def test_embeddings_and_positions(width: int, shift: int) -> None:
    assert_embedded(width, shift=shift)
    assert_embedded(width, streams=1, shift=shift)


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_the_other_devices_place_the_tokens_alike(tokens: int) -> None:
    place = torch.tensor([START]), torch.tensor([REJECTED])
    items = recording(tokens + 2)
    positions_T = next_positions(items, *place, tokens + 2)
    found_T = execute(items, tokens)(positions_T)
    first = START - REJECTED
    assert found_T.tolist() == [*range(first, first + tokens), -1, -1]
    assert list(map(int, place)) == [first + tokens, 0]


@pytest.mark.parametrize("token", [-1, VOCABULARY, 1 << 40])
def test_an_id_outside_the_table_is_a_fault(token: int) -> None:
    items = recording(1)
    table_VE = normal(VOCABULARY, 8, seed=1, dtype=torch.bfloat16)
    place = torch.tensor([0]), torch.tensor([0])
    embed(items, torch.tensor([token]), *place, table_VE, 4, torch.bfloat16)
    with pytest.raises(Trap):
        execute(items, 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_embedded(64, edit=FAULTS[fault])
