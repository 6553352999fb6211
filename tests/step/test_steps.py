"""The steps of an engine on stand-ins for what ranks record: which there are, what each is given,
and what an error takes back.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.values import Watch
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step import steps as module
from dsv4.step.lock_step import Rings, Samplers
from dsv4.step.steps import RecordedSteps

CPU = torch.device("cpu")
PREFILL = 64
GREEDY = Sampler(SamplingParams(temperature=0, logprobs=1))


class FakeStep:
    """Says what it is asked; its last row of logits is the largest at 5."""

    def __init__(self, log: list[Any], length: int, feed: Any = None, apart: bool = False) -> None:
        self.log = log
        self.tokens = length
        self.feed = feed
        self.apart = apart
        self.error: BaseException | None = None
        self.hidden_TE = torch.arange(float(length))[:, None]
        self.logits_TV = torch.zeros(length, 8)
        self.logits_TV[-1, 5] = 1.0
        self.token = torch.tensor(5)

    def run(self, tokens: int, end: int | None = None, observer: object = None) -> None:
        self.log.append(("run", self.tokens, tokens, end, observer))
        if self.error is not None:
            raise self.error

    def sample(self, observer: object = None) -> None:
        self.log.append(("sample", self.tokens, observer))


class FakeRank:
    """Stands for ``RankSteps``."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.sampler = SimpleNamespace(load=lambda sampler: log.append(("load", sampler)))
        self.ring = SimpleNamespace()
        self.allocated: list[str] = []
        self.inputs: dict[int, Tensor] = {}
        self.made: list[FakeStep] = []

    def recorded(self, name: str) -> Any:
        return SimpleNamespace(name=name, kernels=lambda: {name})

    def record(self, tokens: int, traced: Any = None, logits: bool = True) -> tuple[Any, Any]:
        self.log.append(("record", tokens, logits))
        feed = SimpleNamespace(tokens=tokens, put=lambda ids: self.log.append(("put", tokens, ids)))
        return self.recorded(f"of {tokens}"), feed

    def own_steps(self) -> tuple[list[Any], list[Any]]:
        return [self.recorded("own")], [self.recorded("apart")]

    def allocate(self, steps: list[Any]) -> None:
        self.allocated = sorted(step.name for step in steps)

    def ready(self, recorded: Any, feed: Any, apart: bool = False) -> FakeStep:
        assert recorded.name == f"of {feed.tokens}"
        self.made.append(FakeStep(self.log, feed.tokens, feed, apart))
        return self.made[-1]

    def logits_step(self, rows: int) -> tuple[FakeStep, Tensor]:
        self.log.append(("logits", rows))
        self.inputs[rows] = torch.zeros(rows, 1)
        return FakeStep(self.log, rows), self.inputs[rows]


class Together(FakeStep):
    """Stands for ``LockStep``."""

    def __init__(self, ranks: list[FakeStep], state: DecodeState) -> None:
        first = ranks[0]
        super().__init__(first.log, first.tokens, first.feed, first.apart)
        self.ranks = ranks

    def run(self, *arguments: Any, **named: Any) -> None:
        for step in self.ranks:
            step.run(*arguments, **named)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ranks and steps are asked."""
    entries: list[Any] = []
    monkeypatch.setattr(module, "RankSteps", lambda *_: FakeRank(entries))
    monkeypatch.setattr(
        module, "compile_ahead", lambda kernels, _=None: entries.append(("compile", set(kernels)))
    )
    monkeypatch.setattr(module, "LockStep", Together)
    monkeypatch.setattr(module, "log_unusual_kernels", lambda steps: None)
    return entries


def state_of(ranks: int = 1) -> DecodeState:
    def one() -> DecodeState:
        place = torch.zeros(1, dtype=torch.int64)
        return DecodeState((), {CPU: place}, {CPU: place.clone()}, {})

    return replace(one(), others=tuple(one() for _ in range(ranks - 1)))


def steps_of(
    state: DecodeState | None = None, exact: bool = False, prefill: int = PREFILL, ranks: int = 1
) -> Any:
    model: Any = SimpleNamespace(head_device=CPU)
    table: Any = SimpleNamespace(exact=exact)
    return RecordedSteps([model] * ranks, state or state_of(ranks), table, prefill)


def test_what_an_engine_needs_is_recorded_compiled_and_given_memory_at_once(log: list[Any]) -> None:
    """The step of 8 tokens says how much memory; it is built when it is first run."""
    steps = steps_of()
    lengths = [tokens for what, tokens, *_ in log if what == "record"]
    assert lengths == [1, 8, PREFILL]
    compiled = [kernels for what, kernels, *_ in log if what == "compile"]
    assert compiled == [{"own", "apart", "of 1", "of 8", f"of {PREFILL}"}]
    assert steps.ranks[0].allocated == sorted(["own", "of 1", "of 8", f"of {PREFILL}"])
    assert ("logits", 1) in log
    log.clear()
    assert (steps.step(1).tokens, steps.step(9).tokens) == (1, PREFILL)
    assert log == []
    assert steps.step(8).tokens == 8
    assert log == [("record", 8, True), ("compile", {"of 8"})]


@pytest.mark.parametrize("prefill", [1, 8])
def test_prompts_of_no_more_than_8_tokens_have_no_step_of_their_own(
    log: list[Any], prefill: int
) -> None:
    steps_of(prefill=prefill)
    assert [tokens for what, tokens, *_ in log if what == "record"] == [1, 8]


def test_a_step_of_prefill_serves_every_length_or_is_the_only_one_that_is_kept(
    log: list[Any],
) -> None:
    steps = steps_of()
    assert steps.step(9) is steps.step(PREFILL)
    assert steps.step(2) is steps.step(2)
    exact = steps_of(exact=True)
    of_2, of_9 = exact.step(2), exact.step(9)
    exact.step(3)
    assert (of_9.tokens, exact.step(9)) == (9, of_9)
    assert exact.step(10).tokens == 10
    assert exact.step(2) is of_2
    assert exact.step(9) is not of_9
    assert sorted(exact._steps) == [1, 2, 3, 9]


def test_tokens_are_put_counted_and_queued_with_where_they_end(log: list[Any]) -> None:
    state = state_of()
    steps = steps_of(state)
    steps.observer = SimpleNamespace(begin_step=lambda: log.append(("begin",)))
    log.clear()
    assert steps.run([3] * 10).shape == (10, 1)
    assert steps.decode([4]).shape == (1, 8)
    assert log == [
        ("put", PREFILL, [3] * 10),
        ("begin",),
        ("run", PREFILL, 10, 10, steps.observer),
        ("put", 1, [4]),
        ("begin",),
        ("run", 1, 1, 11, steps.observer),
    ]
    assert state.position == 11


def test_a_step_that_fails_leaves_the_sequence_where_it_was(log: list[Any]) -> None:
    state = state_of()
    steps = steps_of(state)
    steps.decode([4])
    steps.step(1).error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        steps.decode([4])
    assert state.position == int(state.positions_1[CPU]) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_are_of_rows_that_every_rank_gets(log: list[Any], ranks: int) -> None:
    state = state_of(ranks)
    state.set_position(7)
    steps = steps_of(state, ranks=ranks)
    hidden_TE = torch.tensor([[1.0], [2.0], [3.0]])
    assert steps.logits(hidden_TE).shape == (3, 8)
    log.clear()
    steps.logits(hidden_TE + 1)
    assert [what for what, *_ in log] == ["run"] * ranks
    for rank in steps.ranks:
        assert rank.inputs[3].tolist() == [[2.0], [3.0], [4.0]]
    assert state.position == 7
    with pytest.raises(AssertionError, match="no more tokens"):
        steps.logits(torch.zeros(9, 1))


def test_an_interrupted_step_for_logits_leaves_the_devices_where_the_host_is(
    log: list[Any],
) -> None:
    state = state_of()
    state.set_position(7)
    steps = steps_of(state)
    step, _ = steps._logits[1]
    step.error = KeyboardInterrupt()
    state.positions_1[CPU].fill_(8)
    with pytest.raises(KeyboardInterrupt):
        steps.logits(torch.zeros(1, 1))
    assert state.position == int(state.positions_1[CPU]) == 7


def test_the_first_token_is_chosen_of_the_last_row_and_noted(log: list[Any]) -> None:
    steps = steps_of()
    log.clear()
    sampler = Sampler(GREEDY.params)
    assert steps.first_token(sampler, torch.tensor([[1.0], [2.0]])) == 5
    assert log == [("load", sampler), ("run", 1, 1, None, None), ("sample", 1, None)]
    assert steps.ranks[0].inputs[1].tolist() == [[2.0]]
    assert len(sampler.noted) == 1


@pytest.mark.parametrize("met", ["a comparison", "the choice"])
def test_a_first_token_of_nan_is_none(log: list[Any], met: str) -> None:
    state = state_of()
    state.set_position(7)
    steps = steps_of(state)
    step, _ = steps._logits[1]
    if met == "a comparison":
        state.nan_1.fill_(1)
    else:
        step.token.fill_(NAN_TOKEN)
    sampler = Sampler(GREEDY.params)
    with pytest.raises(FloatingPointError, match="NaN after 7 tokens"):
        steps.first_token(sampler, torch.zeros(1, 1))
    assert sampler.noted == []


def test_tokens_follow_by_the_step_of_one_and_leaving_closes_the_loop(log: list[Any]) -> None:
    steps = steps_of()
    closed: list[object] = []

    def generate(token: int, sampler: Sampler, count: int, queue: Callable[[int], None]) -> Any:
        try:
            for position in range(count):
                queue(position + 1)
                yield token + 1 + position
        finally:
            closed.append(token)

    # Somebody may still look at the loop.
    loops: list[Any] = []
    steps.loop = SimpleNamespace(generate=lambda *of: loops.append(generate(*of)) or loops[-1])
    log.clear()
    tokens = steps.following(7, GREEDY, 4)
    assert [next(tokens), next(tokens)] == [8, 9]
    tokens.close()
    assert closed == [7]
    runs = [[("run", 1, 1, end, None), ("sample", 1, None)] for end in (1, 2)]
    assert log == [*runs[0], *runs[1]]


def test_traced_steps_are_others_without_logits_and_built_once(log: list[Any]) -> None:
    """What is shown as it is computed needs no memory of its own, what is kept does."""
    steps = steps_of()
    log.clear()
    run = steps.traced(Watch(lambda name, rows: None, lambda name: True))
    for _ in range(2):
        assert run([3] * 10).shape == (10, 1)
    assert [entry for entry in log if entry[0] == "record"] == [("record", PREFILL, False)]
    assert not steps.ranks[0].made[-1].apart
    assert steps.traced_step(2, lambda name: True).apart
    assert not steps.step(2).apart


@pytest.mark.parametrize(("there", "agree"), [(2, True), (1, False)])
def test_ranks_agree_where_all_of_them_are_there(log: list[Any], there: int, agree: bool) -> None:
    peers: Any = SimpleNamespace(ranks=2, fault_4=torch.zeros(4))
    steps = steps_of(replace(state_of(there), peers=peers), ranks=there)
    assert steps.agreeing is (peers if agree else None)
    assert isinstance(steps.ring, Rings) == agree
    assert isinstance(steps.sampler, Samplers) == (there == 2)
    assert isinstance(steps.step(1), Together) == (there == 2)
