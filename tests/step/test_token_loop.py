"""Decoding behind the host, on stand-ins: how far it runs ahead, what it takes back, and where it
ends.
"""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.caches.state import DecodeState
from dsv4.limits import STEPS_AHEAD
from dsv4.logprobs import TokenLogprobs, rank_tokens
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.recorder import RING_TOKENS
from dsv4.step.token_loop import TokenLoop
from dsv4.step.token_ring import LogprobRing
from tests.ops.channel.made import lost_words, wait_for_trapped

GREEDY = Sampler(SamplingParams(temperature=0))
START = 100


class World:
    """A device on which every step adds 1 to its token, and a log of what is asked of it."""

    def __init__(self, nan_at: int | None = None) -> None:
        """``nan_at``: the position behind the step that meets NaN."""
        self.log: list[str] = []
        self.nan_at = nan_at
        self.input = 0
        self.ring: dict[int, int] = {}
        self.marked: list[int] = []
        device = torch.device("cpu")
        zero = torch.zeros(1, dtype=torch.int64)
        self.state = DecodeState((), {device: zero}, {device: zero.clone()}, {})
        self.state.set_position(START)
        self.sampler: Any = SimpleNamespace(load=lambda sampler: self.log.append("sampler"))
        self.feed = SimpleNamespace(put=self.put, pass_on=lambda: self.log.append("pass on"))
        self.step = SimpleNamespace(feed=self.feed)
        self.step.logits_TV = torch.zeros(1, 200)
        self.step.token = torch.tensor(0)

    def put(self, ids: list[int]) -> None:
        (self.input,) = ids
        self.log.append("put")

    def queue(self, end: int) -> None:
        assert end == self.state.position + 1
        self.log.append("step")
        self.input += 1
        position = self.state.position + 1
        if position == self.nan_at:
            self.state.nan_1.fill_(1)
        self.ring[position % RING_TOKENS] = NAN_TOKEN if self.state.met_nan else self.input
        # The next step writes over both.
        self.step.logits_TV.zero_()[0, self.input] = float(position)
        self.step.token.fill_(self.input)

    def mark(self, position: int) -> None:
        self.marked.append(position)

    def read(self, position: int) -> int:
        assert position in self.marked
        assert self.state.position - position < STEPS_AHEAD
        return self.ring[position % RING_TOKENS]

    def generate(self, steps: int, sampler: Sampler = GREEDY) -> Generator[int, None, None]:
        """What follows token 7."""
        ring: Any = SimpleNamespace(mark=self.mark, read=self.read)
        step: Any = self.step
        loop = TokenLoop(step, self.state, self.sampler, ring)
        return loop.generate(7, sampler, steps, self.queue)


def test_tokens_come_in_order_and_the_host_stays_a_few_steps_behind() -> None:
    world = World()
    tokens = world.generate(50)
    assert next(tokens) == 8
    assert world.state.position == START + STEPS_AHEAD
    assert list(tokens) == list(range(9, 58))
    assert world.state.position == START + 50
    assert world.marked == list(range(START + 1, START + 51))
    assert world.log[:2] == ["sampler", "put"]
    assert world.log[2:] == ["step", "pass on"] * 50


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_no_step_is_queued_beyond_what_is_asked_for(steps: int) -> None:
    world = World()
    assert list(world.generate(steps)) == list(range(8, 8 + steps))
    assert world.log.count("step") == steps
    assert world.state.position == START + steps


def test_a_closed_loop_takes_back_what_it_queued_in_vain() -> None:
    world = World()
    tokens = world.generate(50)
    taken = [next(tokens) for _ in range(5)]
    tokens.close()
    assert taken == [8, 9, 10, 11, 12]
    (device,) = world.state.devices
    assert world.state.position == int(world.state.positions_1[device]) == START + 5
    assert world.state.furthest == START + 5 + STEPS_AHEAD - 1


def test_nan_ends_it_by_name() -> None:
    world = World(nan_at=START + 3)
    tokens = world.generate(50)
    assert [next(tokens), next(tokens)] == [8, 9]
    with pytest.raises(FloatingPointError, match=f"NaN after {START + 3} tokens"):
        next(tokens)
    assert world.state.position == START + 3
    assert world.state.met_nan


def test_nan_of_steps_in_vain_is_not_the_sequence_s() -> None:
    """Such a sequence can be saved."""
    world = World(nan_at=START + STEPS_AHEAD)
    tokens = world.generate(50)
    assert next(tokens) == 8
    assert world.state.met_nan
    tokens.close()
    assert world.state.position == START + 1
    assert not world.state.met_nan


def test_an_interrupted_wait_forgets_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then whether it is the sequence's."""

    def interrupted(position: int) -> int:
        raise KeyboardInterrupt

    world = World(nan_at=START + 2)
    monkeypatch.setattr(world, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(world.generate(50))
    assert world.state.met_nan


def test_an_interruption_of_the_last_wait_leaves_the_tokens_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    world = World()
    tokens = world.generate(50)
    next(tokens)
    monkeypatch.setattr(world.state, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens.close()
    assert world.state.position == START + 1


def test_words_that_did_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.state.channels = lost_words()
    monkeypatch.setattr(world, "read", wait_for_trapped)
    with pytest.raises(RuntimeError, match="words of cuda:3 for cuda:1 did not come"):
        next(world.generate(50))


def test_every_token_comes_with_its_own_log_probabilities() -> None:
    """Though the host is behind, and the logits are overwritten by the steps ahead of it."""
    world = World()
    sampler = Sampler(SamplingParams(temperature=0, logprobs=2))
    tokens = list(world.generate(40, sampler))
    assert [noted.token_id for noted in sampler.noted] == tokens == list(range(8, 48))
    for place, noted in enumerate(sampler.noted, START + 1):
        (first, logprob), (second, other) = noted.top
        assert (first, logprob, second) == (noted.token_id, noted.logprob, 0)
        assert logprob - other == pytest.approx(place, rel=1e-5)


def test_every_token_is_noted_where_no_alternative_is_asked_for() -> None:
    sampler = Sampler(SamplingParams(temperature=0, logprobs=0))
    tokens = list(World().generate(9, sampler))
    assert [noted.token_id for noted in sampler.noted] == tokens


def test_a_token_that_cannot_be_noted_forgets_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is the first that nobody knows to be sound."""

    def refused(choice: TokenLogprobs) -> None:
        raise FloatingPointError

    sampler = Sampler(SamplingParams(temperature=0, logprobs=0))
    monkeypatch.setattr(sampler, "add", refused)
    world = World(nan_at=START + 2)
    with pytest.raises(FloatingPointError):
        next(world.generate(50, sampler))
    assert world.state.position == START + 1
    assert world.state.met_nan


@pytest.mark.parametrize("count", [0, 3, 1000])
def test_log_probabilities_of_a_position_are_in_its_slot(count: int) -> None:
    """However many are asked for: there are no more than tokens."""
    logits_PV = torch.randn(RING_TOKENS, 7, generator=torch.Generator().manual_seed(0))
    ring = LogprobRing(count, logits_PV[:1])
    first = RING_TOKENS - 3
    for row, logits_V in enumerate(logits_PV):
        ring.store(first + row, logits_V, torch.tensor(row % 7))
    for row, logits_V in enumerate(logits_PV):
        expected = TokenLogprobs.of(*rank_tokens(logits_V, torch.tensor(row % 7), count))
        assert ring.read(first + row) == expected
        assert len(expected.top) == min(count, 7)
