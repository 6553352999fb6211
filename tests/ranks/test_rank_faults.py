"""What goes wrong on one rank: every rank ends, the error is the one that a lone rank raises, and
the engine can be used again.
"""

import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, ModelConfig, SamplingParams
from dsv4.layers.values import Watch
from dsv4.layers.weights import Weights
from dsv4.ops import TORCH
from dsv4.parallel.sharding import cut_of
from dsv4.step.meeting import Meeting
from dsv4.weights.parameters import parameters
from dsv4.weights.quant import QuantTensor
from tests.model.tiny import random_ids, random_weights
from tests.ranks.simulated import RAW, ranks_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
CONFIG = ModelConfig.from_dict(RAW)
IDS = random_ids(20)
RANKS = 4
# Where NaN in the part of the last rank shows first.
CUT_PLACES = {
    "layers.0.attn.wq_b.weight": "layers.0.attn.q at position 0",
    "layers.1.attn.attn_sink": "layers.1.attn.heads at position 0",
    "layers.2.attn.wo_b.weight": "layers.2.attn.output at position 0",
    "layers.3.ffn.experts.w1.weight": "layers.3.ffn.output at position 0",
    "layers.4.ffn.shared_experts.w2.weight": "layers.4.ffn.output at position 0",
    "head.weight": "logits at position 19",
}
WHOLE_PLACES = {
    "layers.1.attn.indexer.weights_proj.weight": "layers.1.indexer.weights at position 0",
    "layers.4.ffn.gate.weight": "layers.4.router.weights at position 0",
}


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def with_nan(name: str) -> Weights:
    """Random weights with NaN in what the last rank holds of one."""
    weights = random_weights(CONFIG)
    weight = weights[name]
    data = weight.data if isinstance(weight, QuantTensor) else weight
    assert isinstance(data, Tensor)
    cut = cut_of(parameters(CONFIG)[name], RANKS, RANKS - 1)
    part = data if cut is None else data.narrow(cut.dimension, cut.first, cut.stop - cut.first)
    part.fill_(math.nan)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [*CUT_PLACES.items(), *WHOLE_PLACES.items()])
def test_nan_of_one_rank_ends_the_run_with_the_value_that_it_began_in(
    name: str, place: str
) -> None:
    engine = ranks_engine(RANKS, weights=with_nan(name))
    with pytest.raises(FloatingPointError, match=f"^NaN in {place}$"):
        next(engine.generate(IDS, 4, GREEDY))
    assert engine.position == 0


def test_nan_is_in_the_logits_of_its_own_rows_and_of_no_others() -> None:
    logits_TV = ranks_engine(RANKS, weights=with_nan("head.weight")).logits(IDS)
    cut = cut_of(parameters(CONFIG)["head.weight"], RANKS, RANKS - 1)
    assert cut is not None
    is_nan = logits_TV.isnan()
    assert bool(is_nan[:, cut.first :].all())
    assert not bool(is_nan[:, : cut.first].any())


class BrokenLinear:
    """``grouped_linear`` that raises for the weight of one rank's layer while it is ``armed``."""

    def __init__(self) -> None:
        self.armed: Any = None

    def __call__(self, x_TGK: Tensor, weight: Any) -> Tensor:
        if weight is self.armed:
            raise MemoryError("rank's own")
        return TORCH.grouped_linear(x_TGK, weight)


@pytest.fixture
def broken() -> tuple[Engine, BrokenLinear]:
    linear = BrokenLinear()
    return ranks_engine(RANKS, replace(TORCH, grouped_linear=linear)), linear


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("layer", [0, 4])
def test_an_op_that_raises_on_one_rank_ends_the_step_on_all(
    broken: tuple[Engine, BrokenLinear], rank: int, layer: int
) -> None:
    engine, linear = broken
    expected = engine.logits(IDS)
    for fail in (lambda: engine.prefill(IDS), lambda: engine.decode(IDS[:2])):
        linear.armed = engine.models[rank].blocks[layer].attn.wo_a
        with pytest.raises(MemoryError, match="^rank's own$"):
            fail()
        linear.armed = None
        assert torch.equal(engine.logits(IDS), expected)
    assert list(engine.generate(IDS, 4, GREEDY, NO_STOP))


@pytest.mark.slow
def test_a_generation_that_fails_on_one_rank_can_be_begun_again(
    broken: tuple[Engine, BrokenLinear],
) -> None:
    engine, linear = broken
    expected = list(engine.generate(IDS, 6, GREEDY, NO_STOP))
    tokens = engine.generate(IDS, 6, GREEDY, NO_STOP)
    found = [next(tokens) for _ in range(3)]
    linear.armed = engine.models[2].blocks[1].attn.wo_a
    with pytest.raises(MemoryError):
        next(tokens)
    linear.armed = None
    assert found == expected[:3]
    assert list(engine.generate(IDS, 6, GREEDY, NO_STOP)) == expected


@pytest.mark.parametrize("name", ["layers.2.attn.kv", "layers.2.attn.heads"])
def test_a_watch_that_raises_ends_every_rank(name: str) -> None:
    """In a value of rank 0, and in one that the last of the ranks completes."""
    engine = ranks_engine(2)
    expected = engine.logits(IDS)

    def refuse(shown: str, _: Tensor) -> None:
        raise KeyError(shown)

    with pytest.raises(KeyError, match=name):
        engine.run_traced(IDS, Watch(refuse, name.__eq__))
    assert torch.equal(engine.logits(IDS), expected)


def test_ranks_get_each_others_results_in_order_again_and_again() -> None:
    meeting = Meeting(3)

    def rank(number: int) -> list[list[int]]:
        return [meeting.meet(number, 10 * turn + number) for turn in range(50)]

    found = meeting.run([lambda number=number: rank(number) for number in range(3)])
    expected = [[10 * turn + number for number in range(3)] for turn in range(50)]
    assert found == [expected] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_leaves_nobody_waiting(failing: int) -> None:
    meeting = Meeting(3)

    def rank(number: int) -> None:
        meeting.meet(number, number)
        if number == failing:
            raise LookupError(f"rank {number}")
        for _ in range(2):
            meeting.meet(number, number)

    with pytest.raises(LookupError, match=f"^rank {failing}$"):
        meeting.run([lambda number=number: rank(number) for number in range(3)])


def test_an_interruption_while_threads_start_begins_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    begun: list[int] = []
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        Meeting(2).run([lambda number=number: begun.append(number) for number in range(2)])
    for thread in started:
        thread.join()
    assert not begun


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_of_the_caller_leaves_no_rank_running() -> None:
    meeting = Meeting(2)
    may_end = threading.Event()
    caller = threading.get_ident()
    before = threading.active_count()

    def rank(number: int) -> None:
        for turn in count():
            if number == 1 and turn == 3:
                signal.pthread_kill(caller, signal.SIGINT)
            if any(meeting.meet(number, may_end.is_set())):
                return

    with pytest.raises(KeyboardInterrupt):
        meeting.run([lambda number=number: rank(number) for number in range(2)])
    running = threading.active_count() - before
    may_end.set()
    assert running == 0
