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
