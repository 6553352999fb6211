"""What a point of a sequence holds, and how far back it reaches."""

import torch

from dsv4 import EngineConfig, ModelConfig
from dsv4.caches.draft import DraftState
from dsv4.caches.filled import filled_draft_rows, filled_rows
from dsv4.caches.point import Point, undoable_tokens
from dsv4.caches.rows import RowFormat
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import tiny_config
from dsv4.limits import MAX_TAKEN_BACK
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state

CPU = torch.device("cpu")
WINDOW = 16
CONFIG = ModelConfig.from_dict(tiny_config(sliding_window=WINDOW))


def draft_from(first: int) -> DraftState:
    """A module at position 100 with the rows from ``first`` on."""
    draft = DraftState.allocate(CONFIG, 1, RowFormat.PLAIN, torch.float32, CPU, True)
    draft.begin(first, 100 - first)
    return draft


def test_a_point_has_a_module_all_of_whose_rows_are_there() -> None:
    """Those behind 92 tokens as well, which it can be gone back to."""
    for first, expected in ((92 - WINDOW, True), (93 - WINDOW, False)):
        point = Point.of((), draft_from(first), 100, 100)
        assert point.has_draft is expected


def test_a_point_puts_back_what_a_module_held_there() -> None:
    draft = draft_from(0)
    for tensor in draft.tensors():
        tensor.fill_(3)
    point = Point.of((), draft, 100, 100)
    ring = draft.stages[0].ring.data
    ring.fill_(4)
    point.restore((), draft)
    kept = (ring == 3).all(-1)
    assert int(kept.sum()) == 8 + WINDOW


def test_a_point_of_a_sequence_that_went_back_reaches_no_further_than_its_rows() -> None:
    """The rings reach 11 tokens back from the furthest one, and five have been taken back."""
    draft = draft_from(0)
    point = Point.of((), draft, 100, 105)
    assert (point.furthest, point.undoable_tokens) == (105, 6)
    ring = draft.stages[0].ring.data
    ring.fill_(4)
    point.restore((), draft)
    assert int((ring != 4).all(-1).sum()) == 6 + WINDOW


def test_a_point_without_a_module_leaves_its_rows() -> None:
    draft = draft_from(99)
    point = Point.of((), draft, 100, 100)
    draft.stages[0].ring.data.fill_(4)
    point.restore((), draft)
    assert draft.stages[0].ring.data.unique().tolist() == [4]


def test_a_point_leaves_compressed_entries_where_they_are() -> None:
    state = DecodeState.allocate(CONFIG, EngineConfig(kv_dtype="bf16"), 400, (CPU,) * 4)
    point = Point.of(state.layers, None, 300, 300)
    entries = [layer.compressed.rows for layer in state.layers if layer.compressed is not None]
    for rows in entries:
        rows.data.fill_(4)
    point.restore(state.layers, None)
    assert [rows.data.unique().tolist() for rows in entries] == [[4]] * 3


def test_a_point_is_put_back_on_every_rank() -> None:
    placement = Placement.tensor(CONFIG.num_hidden_layers, [CPU] * 2)
    state = allocate_state(CONFIG, EngineConfig(device="cpu"), 256, placement)
    rings = []
    for rank in state.ranks:
        rank.draft = draft_from(0)
        rings += [rank.layers[0].keys.ring.data, rank.draft.stages[0].ring.data]
    state.advance(40)
    for ring in rings:
        ring.fill_(3)
    state.keep_point()
    state.advance(60)
    for ring in rings:
        ring.fill_(4)
    state.go_back(38)
    assert [int((ring == 3).all(-1).sum()) for ring in rings] == [8 + WINDOW] * 4
    assert state.draft is not None
    assert [state.draft.covers(position) for position in (31, 32, 38)] == [False, True, True]


def test_no_more_tokens_are_taken_back_than_there_are() -> None:
    found = [undoable_tokens(position, 100) for position in (100, 97, 90, 100 - MAX_TAKEN_BACK)]
    assert found == [8, 8, 1, 0]
    assert undoable_tokens(3, 3) == 3


def test_rows_that_are_kept_are_those_that_later_tokens_read() -> None:
    """Behind up to 8 tokens less: keys of the window, complete entries, and what an open one
    pools, of both windows where they overlap.
    """
    config = ModelConfig.from_dict(tiny_config(compress_ratios=[0, 4, 128, 0]))
    engine = EngineConfig(kv_dtype="bf16")
    state = DecodeState.allocate(config, engine, 400, (CPU,) * 4)
    rows = list(filled_rows(state.layers, 302, undoable=8))
    found = {one.name: (one.first, one.first + one.count) for one in rows}
    window = (294 - config.sliding_window, 302)
    assert found == {
        **{f"layers.{layer}.window.data": window for layer in range(4)},
        **{f"layers.1.{kind}.data": (0, 75) for kind in ("compressed", "index")},
        **{
            f"layers.1.{kind}.ring.{part}": (294 - 8, 302)
            for kind in ("compressed", "index")
            for part in ("kv", "score")
        },
        "layers.2.compressed.data": (0, 2),
        **{f"layers.2.compressed.ring.{part}": (294 - 128, 302) for part in ("kv", "score")},
    }
    stay = [one.name for one in rows if not one.in_ring]
    assert stay == [name for name in found if name.endswith(("compressed.data", "index.data"))]


def test_of_a_short_sequence_every_row_is_kept() -> None:
    """As far as it can be taken back, and beyond the beginning there is nothing."""
    state = DecodeState.allocate(CONFIG, EngineConfig(kv_dtype="bf16"), 400, (CPU,) * 4)
    rows = [*filled_rows(state.layers, 5, 5), *filled_draft_rows(draft_from(0), 5, 5)]
    assert {one.first for one in rows} == {0}
    assert {one.count for one in rows if one.in_ring} == {5}
    assert {one.name: one.count for one in rows if not one.in_ring} == {
        **{
            f"layers.{layer}.{kind}.data": 1 for layer in (1, 3) for kind in ("compressed", "index")
        },
        "layers.2.compressed.data": 0,
    }
