"""What ranks record of draft modules for published geometries: exchanges like those of layers, in
steps of their own, and streams of prompts that are whole on every rank.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import Geometry
from dsv4.launch.items import Call, Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.token_share import TokenShare
from dsv4.peers import LOGITS_EXCHANGE
from dsv4.speculative.shared_rows import SharedRows
from dsv4.step.captured import regions_of
from dsv4.step.parts import Barrier, Part
from dsv4.step.recorded import RecordedStep
from dsv4.weights.parameters import MtpKind
from tests.ranks.planned_drafts import STAGES, PlannedDrafts, planned_drafts
from tests.ranks.planned_ranks import LoggedRanks, exchange_of, has_words, launches, pushes

PLANNED: list[tuple[Geometry, MtpKind, int]] = [
    ("v4-flash", "classic", 2),
    ("v4-flash", "dspark", 2),
    ("v4-flash", "dspark", 8),
    ("v4-pro", "dspark", 8),
    ("v4-pro", "classic", 8),
]
COUNT = 4


@pytest.fixture(scope="module", params=PLANNED, ids=lambda one: "-".join(map(str, one)))
def planned(request: pytest.FixtureRequest) -> tuple[MtpKind, list[PlannedDrafts]]:
    name, kind, ranks = request.param
    return kind, planned_drafts(name, kind, ranks)


def words(step: RecordedStep) -> list[tuple[bool, tuple[str, int]]]:
    """Of every launch that pushes (true) or polls, with its exchange."""
    return [(pushes(one), exchange_of(one)) for one in launches(step) if has_words(one)]


def test_ranks_take_the_fast_kernels(planned: tuple[MtpKind, list[PlannedDrafts]]) -> None:
    _, ranks = planned
    rank = ranks[-1]
    steps = [rank.record(1), rank.record(8), rank.record(512)]
    steps += [rank.draft_step(COUNT), rank.tail_step()]
    assert [name for step in steps for name in step.unusual_kernels()] == []


def test_a_draft_exchanges_what_a_layer_does(
    planned: tuple[MtpKind, list[PlannedDrafts]],
) -> None:
    """Two sums a stage, then the logits: each is polled before the next one is pushed. Ranks of Pro
    share the stages' input rows.
    """
    kind, ranks = planned
    peers = ranks[0].state.peers
    assert peers is not None
    shares = peers.layout.width == 7168
    for rank in (ranks[0], ranks[-1]):
        step = rank.draft_step(COUNT)
        rows = COUNT if kind == "classic" else 1
        sums = 2 * STAGES[kind]
        exchanges = []
        for row in range(rows):
            for number in range(row * sums, row * sums + sums):
                exchanges += [("rows", number)] if shares and number % 2 == 0 else []
                exchanges.append(("sum", number))
            exchanges.append(("sum", LOGITS_EXCHANGE))
        assert words(step) == [(pushes, e) for e in exchanges for pushes in (True, False)]
        # Logits of two rows have the same number: a row is a step.
        assert step.steps_begun == rows


def test_the_module_s_rows_of_a_step_exchange_nothing(
    planned: tuple[MtpKind, list[PlannedDrafts]],
) -> None:
    kind, ranks = planned
    for tokens in (1, 3, 8):
        step = ranks[0].record(tokens)
        assert words(step) == words(ranks[0].record(tokens, drafted=False))
        # Classic MTP embeds the tokens a second time.
        assert step.steps_begun == (2 if kind == "classic" else 1)
    (recording,) = ranks[0].tail_step().recordings.values()
    assert recording.peers is None


def test_nan_among_drafts_is_not_noted(planned: tuple[MtpKind, list[PlannedDrafts]]) -> None:
    """It ends the drafts, not the run."""
    _, (rank, *_) = planned
    steps = (rank.draft_step(COUNT), rank.tail_step(), rank.record(3))
    recordings = [recording for step in steps for recording in step.recordings.values()]
    assert [recording.nan_1 is not None for recording in recordings] == [False, False, True]


def test_a_part_has_no_poll_behind_a_push(planned: tuple[MtpKind, list[PlannedDrafts]]) -> None:
    """Ranks are queued part by part, so that all can also be on one stream."""
    _, ranks = planned
    for step in (ranks[0].draft_step(COUNT), ranks[0].record(3)):
        (recording,) = step.recordings.values()
        for part in step.parts:
            assert isinstance(part, Part)
            items = recording.items[part.start : part.stop]
            found = [pushes(item) for item in items if isinstance(item, Launch) and has_words(item)]
            assert found == sorted(found)
        covered = [index for part in step.parts for index in _items(part)]
        assert covered == list(range(len(recording.items)))
    assert {name for name, _ in regions_of(ranks[0].draft_step(COUNT).parts, "full")} == {"draft"}
    assert len(regions_of(ranks[0].draft_step(COUNT).parts, "split")) == 1


def _items(part: Any) -> range:
    return range(part.start, part.stop)


def test_words_are_polled_behind_the_pushes_of_all_ranks(
    planned: tuple[MtpKind, list[PlannedDrafts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft and of the step that verifies it, by the numbers of step and exchange."""
    ranks: Any = planned[1]
    drafting: Any = [
        SimpleNamespace(record=lambda _, rank=rank: rank.draft_step(COUNT), state=rank.state)
        for rank in ranks
    ]
    begun = Counter[int]()
    counted = ranks[0].state._steps_begun
    for models, tokens in ((drafting, COUNT), (ranks, COUNT + 1), (drafting, COUNT)):
        logged = LoggedRanks.of(models, tokens, monkeypatch)
        logged.step.run(tokens)
        pushed: set[tuple[int, int, tuple[str, int]]] = set()
        polls = 0
        for device, index in logged.log:
            launch = logged.launch((device, index))
            if launch is None:
                continue
            rank = device.index
            begun[rank] += launch.arguments.get("step") is not None
            if not has_words(launch):
                continue
            exchange = exchange_of(launch)
            if pushes(launch):
                pushed.add((rank, begun[rank], exchange))
            else:
                word = begun[rank], exchange
                assert {(other, *word) for other in range(len(ranks))} <= pushed
                polls += 1
        assert polls == len(pushed) > 0
        # The host counts as every device does.
        assert set(begun.values()) == {ranks[0].state._steps_begun - counted}


def test_every_rank_records_the_same_parts(planned: tuple[MtpKind, list[PlannedDrafts]]) -> None:
    _, ranks = planned
    for make in (lambda rank: rank.draft_step(COUNT), lambda rank: rank.record(512)):
        first, last = make(ranks[0]), make(ranks[-1])
        assert [part.name.split(" of ")[0] for part in first.parts] == [
            part.name.split(" of ")[0] for part in last.parts
        ]
        assert Counter(one.signature.kernel for one in launches(first)) == Counter(
            one.signature.kernel for one in launches(last)
        )


def test_a_prompt_s_rows_are_run_when_all_ranks_have_sent_theirs(
    planned: tuple[MtpKind, list[PlannedDrafts]],
) -> None:
    _, ranks = planned
    step = ranks[0].record(512)
    kinds = [part.kind if isinstance(part, Part) else "barrier" for part in step.parts[-3:]]
    assert kinds == ["draft", "barrier", "draft"]
    assert isinstance(step.parts[-2], Barrier)
    (recording,) = step.recordings.values()
    send, run = recording.items[-2:]
    assert isinstance(send, Call)
    assert isinstance(run, Call)
    assert len(send.tensors) == len(ranks[0].along.module.scope.taps)
    shared = ranks[0].along.memory.shared
    assert all(one is own for one, own in zip(run.tensors[1:], shared, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [9, 16, 17, 40, 41, 64, 100])
def test_rows_of_all_ranks_together_are_the_last_ones(tokens: int, ranks: int) -> None:
    """Every rank has streams of its own tiles of 16 tokens, and anything in the others."""
    room = 40
    whole = [torch.arange(tokens * 2.0).view(tokens, 1, 2) + tap for tap in range(2)]
    memory = tuple(tuple(torch.full((room, 1, 2), -1.0) for _ in whole) for _ in range(ranks))
    for rank in range(ranks):
        share = TokenShare(rank, ranks)
        own = [torch.full((128, 1, 2), torch.nan) for _ in whole]
        for start, stop in share.spans(0, tokens):
            for tap, rows in zip(own, whole, strict=True):
                tap[start:stop] = rows[start:stop]
        run_shared(SharedRows(share, memory), own, tokens)
    kept = min(tokens, room)
    for of_rank in memory:
        for rows, expected in zip(of_rank, whole, strict=True):
            assert torch.equal(rows[:kept], expected[-kept:])
            assert bool((rows[kept:] == -1).all())


def run_shared(shared: SharedRows, taps: list[Tensor], tokens: int) -> None:
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), 128)
    shared.record(recording, taps)
    (item,) = recording.items
    assert isinstance(item, Call)
    item.function(tokens, *item.tensors)
    assert recording.end_part() == [(1, True)]
