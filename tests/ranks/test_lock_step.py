"""In what order ranks are queued: whatever waits for others comes behind all that they do for it,
eagerly and by replays, interrupted or not.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.step import captured
from dsv4.step.captured import CapturedRanks, Mode
from dsv4.step.lock_step import LockStep
from dsv4.step.recorded import RecordedStep
from tests.ranks.planned_ranks import (
    LoggedRanks,
    exchange_of,
    has_words,
    planned_ranks,
    pushes,
    sharing_layers,
)
from tests.step.memory_order import SharedMemory
from tests.step.planned_model import GPUS, PlannedModel, items_of

MODES: tuple[Mode, ...] = get_args(Mode)
RANKS = (2, 8)
LAYERS = 5
# Windows, windows, CSA, HCA, CSA.
CSA_LAYERS = 2
STREAMS: Any = dict.fromkeys(GPUS)
# Where the indexer has nothing to choose, and where it has.
NEAR = 100
FAR = 5000


@pytest.fixture(scope="module", params=RANKS)
def planned(request: pytest.FixtureRequest) -> list[PlannedModel]:
    return planned_ranks("v4-flash", request.param, LAYERS)


def assert_consumers_behind_producers(ranks: LoggedRanks) -> int:
    """Every poll of an exchange is behind the pushes of all ranks. Returns how many there are."""
    pushed: set[tuple[int, tuple[str, int]]] = set()
    polls = 0
    for device, index in ranks.log:
        launch = ranks.launch((device, index))
        if launch is None or not has_words(launch):
            continue
        exchange = exchange_of(launch)
        if pushes(launch):
            assert (device.index, exchange) not in pushed
            pushed.add((device.index, exchange))
        else:
            assert {(rank, exchange) for rank in range(len(ranks.step.ranks))} <= pushed
            polls += 1
    return polls


@pytest.mark.parametrize("tokens", [1, 8])
def test_words_are_polled_behind_the_pushes_of_all_ranks(
    planned: list[PlannedModel], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LoggedRanks.of(planned, tokens, monkeypatch)
    ranks.step.run(tokens)
    shared = len(sharing_layers(planned[0], len(planned)))
    expected = len(planned) * (2 * LAYERS + shared + 1)
    assert assert_consumers_behind_producers(ranks) == expected
    if tokens == 1:
        ranks.step.sample()
    for step in ranks.step.ranks:
        own = [entry for entry in ranks.log if entry[0] == step.recorded.head]
        assert own == items_of(step.recorded.parts)


def regions_of(launch: Launch, step: RecordedStep, rank: int, ranks: int) -> list[tuple[Any, bool]]:
    """What a launch reads or writes of the memory that ranks share."""
    (recording,) = step.recordings.values()
    peers = recording.peers
    assert peers is not None
    if launch.signature.kernel == "sum_ranks":
        slot = int(launch.arguments["first"] != 0)
        return [((other, "partials", slot), False) for other in range(ranks)]
    pushes = launch.signature.kernel == "hc_finish" and launch.arguments["peers"] is not None
    # Of the input and the choices of every rank each writes the rows of its own tokens.
    written = "inputs" if pushes else "chosen" if launch.signature.kernel == "top_k_tokens" else ""
    found = [((other, written, rank), True) for other in range(ranks)] if written else []
    for tensor in launch.tensors:
        memory = recording.placed.get(storage_key(tensor))
        if memory is None:
            continue
        if storage_key(memory) == storage_key(peers.partials_STE):
            # Some kernels add to what is there.
            slot = int(memory.storage_offset() != 0)
            found.append(((rank, "partials", slot), True))
        elif not written:
            read = {storage_key(peers.inputs_TE): "inputs", storage_key(peers.chosen_TK): "chosen"}
            what = read[storage_key(memory)]
            found += [((rank, what, writer), False) for writer in range(ranks)]
    return found


def test_ranks_touch_each_others_memory_behind_all_that_needs_it(
    planned: list[PlannedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial results are added where they lie, inputs and choices are written by all: twice,
    because a step may follow another.
    """
    ranks = LoggedRanks.of(planned, 512, monkeypatch)
    count = len(planned)
    shared = SharedMemory(count)
    kernels = Counter[tuple[int, str]]()
    for _ in range(2):
        ranks.step.run(100)
    for device, what in ranks.log:
        rank = device.index
        if not shared.runs(rank, what):
            continue
        launch = ranks.launch((device, what))
        assert launch is not None
        step = ranks.step.ranks[rank].recorded
        for region, writes in regions_of(launch, step, rank, count):
            shared.touch(rank, region, writes)
            kernels[rank, f"{launch.signature.kernel} {region[1]}"] += 1
    for rank in range(count):
        assert kernels[rank, "sum_ranks partials"] == 2 * 2 * LAYERS * count
        assert kernels[rank, "hc_finish inputs"] == 2 * 2 * LAYERS * count
        # The head's result stays where it is.
        readers = [name for of, name in kernels if of == rank and name.endswith("inputs")]
        assert len(readers) > 2
        assert kernels[rank, "top_k_tokens chosen"] == 2 * CSA_LAYERS * count
        assert kernels[rank, "attention_prefill_few_sm90 chosen"] == 2 * CSA_LAYERS * count
    records = sum(what == "record" for _, what in ranks.log)
    assert records == 2 * (4 * LAYERS + CSA_LAYERS) * (count + (count > 2))


class FakeGraph:
    """Replays what its body queued; an interruption comes right behind it."""

    def __init__(self, log: list[Any], body: Callable[[], object]) -> None:
        before = len(log)
        body()
        self.items = log[before:]
        self.raises: BaseException | None = None
        self._log = log

    def replay(self) -> None:
        self._log += self.items
        if self.raises is not None:
            raise self.raises


def capture(
    ranks: LoggedRanks, planned: list[PlannedModel], mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> tuple[CapturedRanks, list[FakeGraph]]:
    """All ranks captured on stand-ins, and their graphs by rank; the log is empty afterwards."""
    graphs: list[FakeGraph] = []

    def capture_graph(_stream: object, _pool: object, body: Callable[[], object]) -> FakeGraph:
        graphs.append(FakeGraph(ranks.log, body))
        return graphs[-1]

    monkeypatch.setattr(captured, "capture_graph", capture_graph)
    found = CapturedRanks(ranks.step, planned[0].state, STREAMS, mode, (0, 0), FAR)
    ranks.log.clear()
    return found, graphs


@pytest.mark.parametrize("mode", MODES)
def test_replays_queue_every_region_of_all_ranks_before_the_next(
    planned: list[PlannedModel], mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a region the ranks' graphs wait for each other, on GPUs of their own."""
    ranks = LoggedRanks.of(planned, 1, monkeypatch)
    replayed, _ = capture(ranks, planned, mode, monkeypatch)
    begun = planned[0].state._steps_begun
    replayed.run_and_sample(FAR)
    assert planned[0].state._steps_begun == begun + 1
    count = len(planned)
    for step in ranks.step.ranks:
        own = [entry for entry in ranks.log if entry[0] == step.recorded.head]
        assert own == items_of(step.recorded.parts)
    order = [device.index for device, _ in ranks.log]
    turns = [rank for at, rank in enumerate(order) if at == 0 or order[at - 1] != rank]
    assert turns == list(range(count)) * (len(turns) // count)
    outside = LAYERS if mode == "split" else 0
    assert len(turns) // count == len(replayed.regions) + outside
    expected = f"layers 0 to {LAYERS - 1}, head, sample" if mode == "full" else "head, sample"
    assert replayed.regions[-1] == expected, "logits, too, are of the head"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("launch failed")])
def test_an_interrupted_row_is_finished(
    planned: list[PlannedModel],
    mode: Mode,
    interruption: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks get the region that was under way, none gets the next one."""
    ranks = LoggedRanks.of(planned, 1, monkeypatch)
    replayed, graphs = capture(ranks, planned, mode, monkeypatch)
    replayed.run(NEAR)
    whole = list(ranks.log)
    captured_graphs = len(graphs) // len(planned)
    # Those of a dense step are captured first.
    for region in (0, len(replayed.regions) - 1):
        for rank in (0, len(planned) - 1):
            row = [graphs[other * captured_graphs + region] for other in range(len(planned))]
            ranks.log.clear()
            row[rank].raises = interruption
            with pytest.raises(type(interruption)):
                replayed.run(NEAR)
            row[rank].raises = None
            last = [item for graph in row for item in graph.items]
            assert ranks.log[-len(last) :] == last
            for graph in row:
                assert ranks.log.count(graph.items[0]) == 1
    ranks.log.clear()
    replayed.run(NEAR)
    assert ranks.log == whole


def test_ranks_that_share_a_device_are_not_captured_side_by_side(
    planned: list[PlannedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LoggedRanks.of(planned, 1, monkeypatch)
    same = LockStep([ranks.step.ranks[0]] * 2, planned[0].state)
    with pytest.raises(ValueError, match="ranks: found 2 on cuda:0, expected one each"):
        CapturedRanks(same, planned[0].state, STREAMS, "full", (0, 0), FAR)


@pytest.mark.parametrize("mode", MODES)
def test_replays_of_ranks_are_queued_inside_one_turn(
    planned: list[PlannedModel], mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that wait for each other share no GPU with those of another engine."""
    ranks = LoggedRanks.of(planned, 1, monkeypatch)

    @contextmanager
    def taken() -> Iterator[None]:
        ranks.log.append("turn")
        yield
        ranks.log.append("end of turn")

    turns: Any = SimpleNamespace(taken=taken)
    own = replace(planned[0], state=replace(planned[0].state, turns=turns))
    replayed, _ = capture(ranks, [own, *planned[1:]], mode, monkeypatch)
    replayed.run_and_sample(FAR)
    begin, *queued, end = ranks.log
    items = [item for step in ranks.step.ranks for item in items_of(step.recorded.parts)]
    assert (begin, end) == ("turn", "end of turn")
    assert Counter(queued) == Counter(items)
