"""The state of every rank: places that move together, and memory of their own."""

from collections.abc import Sequence

import pytest
import torch

from dsv4.caches.allocation import step_tokens
from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.parallel import rank_state
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.peers import SLOTS, STEP_NUMBERS
from dsv4.turns import Turns
from tests.model.tiny import CPU, small_config

CONFIG = ModelConfig.from_dict(small_config())


@pytest.fixture
def state() -> DecodeState:
    placement = Placement.tensor(CONFIG.num_hidden_layers, (CPU,) * 2)
    return allocate_state(CONFIG, EngineConfig(device="cpu"), 256, placement)


def test_all_ranks_move_together_and_agree_on_the_number_of_the_step(state: DecodeState) -> None:
    def places() -> list[list[int]]:
        found = []
        for rank in state.ranks:
            assert rank.peers is not None
            place = (*rank.place(CPU), rank.peers.step_4)
            found.append([int(tensor[0]) for tensor in place])
        return found

    state.set_position(9)
    assert places() == [[9, 0, 0]] * 2
    state.begin_step(3)
    # What an accident left: one rank moved on, the other did not.
    first, second = state.ranks
    assert first.peers is not None
    first.peers.step_4[0] = 2
    first.positions_1[CPU].fill_(11)
    second.rejected_1[CPU].fill_(1)
    state.rollback(8)
    assert places() == [[8, 0, 3]] * 2
    state.start_sequence()
    assert places() == [[0, 0, 3]] * 2
    state._steps_begun = STEP_NUMBERS + 5
    state.resume(4, 6)
    assert places() == [[4, 0, 5]] * 2


def test_ranks_have_caches_of_their_own_and_one_word_for_nan(state: DecodeState) -> None:
    first, second = state.ranks
    assert first.nan_1 is second.nan_1
    rings = [rank.layers[0].keys.ring.data.data_ptr() for rank in state.ranks]
    assert rings[0] != rings[1]
    assert first.peers is not None
    assert second.peers is not None
    assert (first.peers.rank, second.peers.rank) == (0, 1)
    for peers in (first.peers, second.peers):
        own, step, fault, *partials = peers.table_P[2:].tolist()
        assert own == peers.table_P[peers.rank] == peers.inbox.data_ptr()
        assert partials[peers.rank] == peers.partials_STE.data_ptr()
        assert partials[2 + peers.rank] == peers.inputs_TE.data_ptr()
        assert partials[4 + peers.rank] == peers.chosen_TK.data_ptr()
        assert (step, fault) == (peers.step_4.data_ptr(), peers.fault_4.data_ptr())
    for shared in (slice(0, 2), slice(5, 11)):
        assert torch.equal(first.peers.table_P[shared], second.peers.table_P[shared])
    assert first.peers.fault_4 is second.peers.fault_4


def test_memory_that_ranks_share_is_what_kernels_take_it_for(state: DecodeState) -> None:
    tokens = step_tokens(EngineConfig(device="cpu"))
    for rank in state.ranks:
        peers = rank.peers
        assert peers is not None
        terms = (SLOTS, tokens, CONFIG.hidden_size)
        assert (tuple(peers.partials_STE.shape), peers.partials_STE.dtype) == (terms, torch.float32)
        assert tuple(peers.inputs_TE.shape) == terms[1:]
        assert tuple(peers.chosen_TK.shape) == (tokens, CONFIG.index_topk)
        assert (peers.inputs_TE.dtype, peers.chosen_TK.dtype) == (torch.bfloat16, torch.int64)
        assert {peers.step_4.dtype, peers.fault_4.dtype} == {torch.int32}
        assert {peers.table_P.dtype, peers.inbox.dtype} == {torch.int64}


@pytest.mark.parametrize(("planned", "expected"), [(False, (CPU,)), (True, ())])
def test_turns_are_taken_on_the_devices_that_are_there(
    planned: bool, expected: tuple[torch.device, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may be of GPUs that are not."""
    given: list[tuple[torch.device, ...]] = []

    def turns(devices: Sequence[torch.device]) -> Turns:
        given.append(tuple(devices))
        return Turns(devices)

    monkeypatch.setattr(rank_state, "Turns", turns)
    placement = Placement.tensor(CONFIG.num_hidden_layers, (CPU,) * 2)
    state = allocate_state(CONFIG, EngineConfig(device="cpu"), 256, placement, planned)
    assert given == [expected]
    assert state.turns is not None


@pytest.mark.parametrize("reached", [True, False])
def test_devices_that_reach_each_other_have_channels_and_all_take_turns(
    reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(torch.device("cuda", index) for index in range(2))
    places: list[torch.device] = []

    def shared_memory(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        places.append(device)
        return torch.zeros(shape, dtype=dtype)

    lone = allocate_state(CONFIG, EngineConfig(device="cpu"), 64, Placement.of_layers((CPU,) * 4))
    assert (lone.turns, lone.channels) == (None, None)
    monkeypatch.setattr(DecodeState, "allocate", lambda *_: lone)
    monkeypatch.setattr(rank_state, "shared_memory", shared_memory)
    monkeypatch.setattr(rank_state, "reach_each_other", lambda _: reached)
    state = allocate_state(CONFIG, EngineConfig(), 64, Placement.round_robin(4, gpus))
    assert state.turns is not None
    assert state.turns._devices == gpus
    if not reached:
        assert (state.channels, places) == (None, [])
        return
    assert state.channels is not None
    assert state.channels._turns is state.turns
    ends = [(channel.source, channel.target) for channel in state.channels.all]
    assert sorted(ends, key=str) == [gpus, gpus[::-1]]
    assert places == [target for _, target in ends]
