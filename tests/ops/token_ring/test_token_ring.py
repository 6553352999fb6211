"""The store of a sampled token: its slot, and what the next step gets."""

import pytest
import torch

from dsv4.ops import Ops
from dsv4.ops.immediate import immediately
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.ops.token_ring.cuda import store_token


@pytest.mark.parametrize(("position", "slot"), [(0, 0), (5, 5), (7, 0), (1_000_003, 1_000_003 % 7)])
@pytest.mark.parametrize("token", [0, 129_279, NAN_TOKEN])
def test_token_goes_to_its_slot_and_to_the_next_step(
    ops: Ops, position: int, slot: int, token: int
) -> None:
    ring_R = torch.full((7,), -9)
    next_1 = torch.full((1,), -9)
    nan_1 = torch.zeros(1, dtype=torch.int32)
    ops.store_token(torch.tensor(token), torch.tensor([position]), next_1, ring_R, nan_1)
    assert ring_R.tolist() == [token if index == slot else -9 for index in range(7)]
    assert next_1.tolist() == [max(token, 0)]


def test_nan_that_was_met_takes_the_place_of_the_token(ops: Ops) -> None:
    ring_R = torch.zeros(7, dtype=torch.int64)
    next_1 = torch.full((1,), -9)
    nan_1 = torch.ones(1, dtype=torch.int32)
    ops.store_token(torch.tensor(5), torch.tensor([2]), next_1, ring_R, nan_1)
    assert ring_R.tolist() == [0, 0, NAN_TOKEN, 0, 0, 0, 0]
    assert next_1.tolist() == [0]
    assert nan_1.tolist() == [1]


@pytest.mark.gpu
def test_pinned_memory_is_a_ring_too() -> None:
    ring_R = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    next_1 = torch.zeros(1, dtype=torch.int64, device="cuda")
    token = torch.tensor(3, device="cuda")
    position_1 = torch.tensor([6], device="cuda")
    nan_1 = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    store = immediately(store_token)
    store(token, position_1, next_1, ring_R, nan_1)
    torch.cuda.synchronize()
    assert (ring_R.tolist(), next_1.tolist()) == ([0, 0, 3, 0], [3])
    nan_1.fill_(1)
    store(token, position_1, next_1, ring_R, nan_1)
    torch.cuda.synchronize()
    assert (ring_R.tolist(), next_1.tolist()) == ([0, 0, NAN_TOKEN, 0], [0])
    with pytest.raises(ValueError, match="store_token: found a tensor on cpu, expected cuda"):
        store(token, position_1, next_1, ring_R.clone(), nan_1)
