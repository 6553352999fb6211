"""What a draft module's caches know of a sequence that goes back."""

import pytest
import torch

from dsv4.caches.draft import DraftState
from dsv4.caches.filled import filled_draft_rows
from dsv4.caches.rows import RowFormat
from dsv4.checkpoint import tiny_config
from dsv4.checkpoint.geometries import Geometry, geometry_config
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.limits import MAX_TAKEN_BACK
from dsv4.speculative.module import allocate_draft
from dsv4.weights.parameters import MtpKind

CONFIG = ModelConfig.from_dict(tiny_config(sliding_window=16))


def state_behind(position: int) -> DraftState:
    device = torch.device("cpu")
    state = DraftState.allocate(CONFIG, 1, RowFormat.PLAIN, torch.float32, device, True)
    state.begin(0, position)
    return state


@pytest.mark.parametrize("taken_back", [0, 1, MAX_TAKEN_BACK])
def test_rows_stay_where_tokens_are_taken_back(taken_back: int) -> None:
    state = state_behind(100)
    assert state.covers(100 - taken_back)
    state.begin(100 - taken_back, 3)
    assert state.covers(103 - taken_back)


def test_rows_of_later_positions_are_not_those_before_a_point_that_is_gone_back_to() -> None:
    state = state_behind(1000)
    assert not state.covers(100)
    for position in range(100, 116):
        state.begin(position, 1)
        assert state.covers(position + 1) == (position == 115)


def test_a_new_sequence_knows_all_of_its_rows() -> None:
    state = state_behind(1000)
    state.begin(0, 5)
    assert state.covers(5)


def test_no_row_is_of_a_sequence_that_comes_after_another_wherever_it_begins() -> None:
    state = state_behind(100)
    state.forget()
    assert not any(state.covers(position) for position in range(120))
    state.begin(1, 1)
    assert not state.covers(2)


def test_its_memory_is_that_of_keys_streams_and_positions() -> None:
    state = state_behind(0)
    assert state.streams_SME is not None
    assert state.nbytes == state.stages[0].ring.nbytes + state.streams_SME.nbytes + 2 * 8


def test_rows_that_nobody_has_written_are_not_there() -> None:
    assert not state_behind(100).covers(101)


def test_rows_before_a_gap_are_the_sequence_s_once_they_are_written() -> None:
    state = state_behind(10)
    state.begin(100, 3)
    state.begin(98, 16)
    assert state.covers(114)
    assert not state.covers(113)


def test_behind_a_point_are_the_rows_that_drafts_read_there() -> None:
    state = state_behind(0)
    state.forget()
    state.resume(100, undoable=8)
    assert [state.covers(position) for position in (91, 92, 100, 101)] == [False, True, True, False]
    assert state.is_whole(100, 8)
    assert not state.is_whole(100, 9), "rows before those of the point"
    assert not state.is_whole(101, 9), "the row behind the point"


def test_rows_reach_as_far_back_as_tokens_are_taken_back() -> None:
    """Those of the rings, of long steps, and streams: of a position the last before it."""
    state = state_behind(100)
    read = 100 - state.rows_begin(100, MAX_TAKEN_BACK)
    assert state.remembered_rows == read
    assert state.stages[0].ring.slots >= read
    positions_T = torch.arange(60, 100).float()
    shape = (40, CONFIG.hc_mult, CONFIG.hidden_size)
    state.keep_streams(positions_T[:, None, None].expand(shape), 100)
    for position in range(100 - MAX_TAKEN_BACK, 101):
        assert state.streams_at(position - 1).unique().tolist() == [position - 1]


def test_its_bytes_are_those_of_rows_scales_and_place() -> None:
    device = torch.device("cpu")
    state = DraftState.allocate(CONFIG, 2, RowFormat.KV_FP8, torch.float32, device, False)
    assert state.nbytes == sum(keys.ring.nbytes for keys in state.stages) + 16


@pytest.mark.parametrize(
    ("name", "kind", "stages", "nbytes"),
    [
        ("v4-flash", "classic", 1, 374336),
        ("v4-flash", "dspark", 3, 238272),
        ("v4-pro", "classic", 1, 595520),
    ],
)
def test_what_a_point_of_a_published_geometry_takes_of_a_module(
    name: Geometry, kind: MtpKind, stages: int, nbytes: int
) -> None:
    config = ModelConfig.from_dict(geometry_config(name))
    draft = allocate_draft(config, EngineConfig(), (kind, stages), torch.device("meta"))
    rows = filled_draft_rows(draft, 4096, 8)
    assert sum(one.count * one.shape[1] * one.store.itemsize for one in rows) == nbytes
