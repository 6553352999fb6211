"""The sum of a token's experts, executed on the CPU: to the bit that of float32 in ascending order
of the experts.
"""

import pytest
import torch
from torch import Tensor

from dsv4.integers import round_up
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe.prefill import combine
from dsv4.ops.moe.sorted_pairs import Cut, Sorted
from tests.ops.cases import normal
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

CPU = torch.device("cpu")
TOKENS = 5
EXPERTS = 20
FAULTS = {
    "the order of the slots": SourceEdit("moe_combine.cu", "order[rank] =", "order[threadIdx.x] ="),
    "ids that are no expert count": SourceEdit(
        "moe_combine.cu", "if (expert[threadIdx.x] < experts) atomicAdd", "atomicAdd"
    ),
}


def ids_of(per_token: int) -> Tensor:
    """Experts in no order; also some twice, and ids that are no expert."""
    generator = torch.Generator().manual_seed(per_token)
    ids_TP = torch.randint(EXPERTS, (TOKENS, per_token), generator=generator)
    ids_TP[1] = -1
    ids_TP[2, 0] = EXPERTS
    ids_TP[3, -1] = ids_TP[3, 0]
    return ids_TP


def in_order(shared_TE: Tensor, routed_TPE: Tensor, ids_TP: Tensor) -> Tensor:
    sum_TE = shared_TE.clone()
    for token, ids in enumerate(ids_TP.tolist()):
        slots = [slot for slot, expert in enumerate(ids) if 0 <= expert < EXPERTS]
        for slot in sorted(slots, key=ids.__getitem__):
            sum_TE[token] += routed_TPE[token, slot]
    return sum_TE


def assert_sums(
    per_token: int,
    width: int,
    dtype: torch.dtype,
    edit: SourceEdit | None = None,
) -> None:
    """Recorded for more tokens than there are; a product that nobody chose is NaN."""
    most = TOKENS + 2
    ids_TP = ids_of(per_token)
    routed_TPE = normal(TOKENS, per_token, width, seed=1)
    routed_TPE[(ids_TP < 0) | (ids_TP >= EXPERTS)] = torch.nan
    shared_TE = normal(most, round_up(width, 4), seed=2)[:, :width]
    recording = Recording(Target(CPU, "sm_90a", 132), most)
    y_TE = recording.empty((most, width), dtype)
    no_pairs = torch.empty(0, dtype=torch.int32)
    pairs = Sorted(no_pairs, no_pairs, no_pairs, Cut(per_token, EXPERTS, finely=True))
    combine(recording, shared_TE, routed_TPE.flatten(0, 1), ids_TP, pairs, y_TE)
    found = execute(recording, TOKENS, edit)(y_TE)
    expected = in_order(shared_TE[:TOKENS], routed_TPE, ids_TP).to(dtype)
    assert torch.equal(found[:TOKENS], expected)
    assert found[TOKENS:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("per_token", "width"), [(1, 4), (6, 1060), (16, 70), (8, 301)])
def test_experts_are_added_in_ascending_order(
    per_token: int, width: int, dtype: torch.dtype
) -> None:
    assert_sums(per_token, width, dtype)


@pytest.mark.parametrize("width", [64, 70])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, width: int) -> None:
    with pytest.raises(AssertionError):
        assert_sums(16, width, torch.float32, edit=FAULTS[fault])
