"""The loop of steps with drafts on stand-ins for the devices: what is queued before what is read,
and what is taken back.
"""

from collections import deque
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4 import EngineConfig, ModelConfig, SamplingParams
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import tiny_config
from dsv4.ops.acceptance import KEPT, settle_block
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler, SamplerState
from dsv4.speculative.block_loop import BlockLoop, Drafting
from dsv4.speculative.block_ring import Given
from dsv4.speculative.module import allocate_draft
from dsv4.speculative.resting import with_rests
from dsv4.speculative.tally import DraftCount, Tally

CPU = torch.device("cpu")
GREEDY = Sampler(SamplingParams(temperature=0))
START = 30
SLOTS = 32
WINDOW = 16
CONFIG = ModelConfig.from_dict(tiny_config(sliding_window=WINDOW))


class World:
    """A device that computes when it is told to: ``text`` is what the model says at each place, a
    draft there is right but where ``wrong`` is true. Where ``nan`` is true drafts bring NaN.
    """

    def __init__(self, drafts: int | None, most: int = 5, context: int = 400) -> None:
        self.text = [(7 * place + 3) % 251 for place in range(2010)]
        self.wrong = [False] * 2010
        self.nan = [False] * 2010
        self.log: list[Any] = []
        engine = EngineConfig(device="cpu", max_context=2048)
        self.state = DecodeState.allocate(CONFIG, engine, 2048, (CPU,) * CONFIG.num_hidden_layers)
        self.state.draft = allocate_draft(CONFIG, engine, ("classic", 1), CPU)
        self.state.set_position(START)
        self.state.draft.begin(0, START)
        self.state.furthest = START
        self.place = self.state.place(CPU)
        self.next_1 = torch.zeros(1, dtype=torch.int64)
        self.ring_3R = torch.full((3, SLOTS), -9)
        self.count = DraftCount(range(most + 1) if drafts is None else (drafts,))
        self.tally = Tally(most)
        self._drafts: list[int] = []
        self._queued: deque[int] = deque()
        ring: Any = self
        self.loop = BlockLoop(self.state, SamplerState.allocate(CPU), ring, context, self.rejected)

    def generate(self, steps: int, sampler: Sampler = GREEDY) -> Any:
        queue: Any = self
        token = self.text[START]
        return self.loop.generate(token, sampler, steps, queue, Drafting(self.count, self.tally))

    def logits(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, 251)

    def generate_with_rests(self, steps: int) -> Any:
        drafting = Drafting(self.count, self.tally)
        assert self.state.draft is not None

        def drafted(token: int, room: int) -> Any:
            queue: Any = self
            return self.loop.generate(token, GREEDY, room, queue, drafting)

        token = self.text[START]
        return with_rests(token, steps, drafting, self.state.draft, drafted, self.alone)

    def alone(self, token: int, steps: int) -> Any:
        for _ in range(steps):
            position = self.state.position
            assert self.text[position] == token
            self.state.advance(1)
            self.state.set_position(position + 1)
            self.log.append((position, 0))
            token = self.text[position + 1]
            yield token

    # The queue.
    def feed(self, tokens: int) -> Any:
        return SimpleNamespace(put=self.put, pass_on=lambda: None)

    def put(self, tokens: list[int]) -> None:
        self.next_1.fill_(tokens[0])

    def draft(self, count: int) -> None:
        first = int(self.place[0] - self.place[1]) + 1
        self._drafts = [
            (self.text[place] + self.wrong[place]) % 251 for place in range(first, first + count)
        ]

    def verify(self, tokens: int, end: int) -> None:
        position_1, rejected_1 = self.place
        first = int(position_1 - rejected_1)
        assert int(self.next_1) == max(self.text[first], 0), "the step reads the last token"
        assert first + tokens <= end, "the sequence may be so long behind it"
        self.log.append((first, tokens))
        position_1.fill_(first + tokens)
        rejected_1.zero_()

    def settle(self, tokens: int) -> None:
        count = tokens - 1
        end = int(self.place[0])
        places = range(end - count, end)
        pairs = zip(places, self._drafts, strict=False)
        replacements = [
            NAN_TOKEN
            if self.nan[place]
            else KEPT
            if draft == self.text[place]
            else self.text[place]
            for place, draft in pairs
        ]
        judged = (torch.tensor(replacements), torch.tensor(self._drafts)) if count else None
        behind = torch.tensor(self.text[end])
        nan_1 = torch.zeros(1, dtype=torch.int32)
        settle_block(judged, behind, self.place, self.next_1, self.ring_3R, nan_1)

    def rejected(self) -> None:
        """There is one device."""

    # The ring.
    def begin(self) -> None:
        self._queued.append(0)
        assert len(self._queued) <= 2

    def mark_drafted(self) -> None:
        """Everything is done at once."""

    mark_settled = mark_drafted

    def read(self, position: int) -> Given:
        self._queued.popleft()
        count, drafted = (int(self.ring_3R[row, position % SLOTS]) for row in (1, 2))
        places = range(position + 1, position + 1 + count)
        tokens = [int(self.ring_3R[0, place % SLOTS]) for place in places]
        return Given(tokens, drafted, (1.0, 1.0))

    def forget(self) -> None:
        self._queued.clear()

    def expect_at(self, position: int) -> None:
        """Host and device stand there, with nothing pending."""
        assert self.state.position == position
        assert [int(tensor) for tensor in self.place] == [position, 0]
        assert self.state.furthest == max(first + max(1, tokens) for first, tokens in self.log)


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
@pytest.mark.parametrize("pattern", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_the_text_is_the_model_s_whatever_stays(drafts: int, pattern: int, steps: int) -> None:
    world = World(drafts, most=7)
    world.wrong = [place % pattern == 0 for place in range(400)]
    found = list(world.generate(steps))
    assert found == world.text[START + 1 : START + 1 + steps]
    assert world.tally.stats().tokens == steps
    world.expect_at(START + steps)
    # All steps are alike, and none is in vain.
    assert all(tokens == drafts + 1 for _, tokens in world.log)
    assert all(first < START + steps for first, _ in world.log)


@pytest.mark.parametrize("drafts", [1, 5, 7])
@pytest.mark.parametrize("pattern", [1, 3, 100])
def test_where_the_context_ends_steps_make_no_drafts(drafts: int, pattern: int) -> None:
    context = START + 23
    world = World(drafts, most=7, context=context)
    world.wrong = [place % pattern == 0 for place in range(400)]
    steps = context - START
    assert list(world.generate(steps)) == world.text[START + 1 : START + 1 + steps]
    world.expect_at(context)
    assert max(first + tokens for first, tokens in world.log) == context
    alone = [first for first, tokens in world.log if tokens == 1]
    assert all(first + drafts + 1 > context for first in alone if first < context - 1)


@pytest.mark.parametrize("taken", range(1, 14))
@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_what_is_queued_in_vain_is_taken_back(drafts: int, taken: int) -> None:
    world = World(drafts, most=7)
    world.wrong = [place % 4 == 0 for place in range(400)]
    tokens = world.generate(60)
    assert [next(tokens) for _ in range(taken)] == world.text[START + 1 : START + 1 + taken]
    tokens.close()
    world.expect_at(START + taken)
    assert world.state.undoable_tokens >= 0
    assert world.state.draft is not None
    assert world.state.draft.covers(world.state.position)


def test_steps_are_the_same_where_every_token_is_noted() -> None:
    logs = []
    for logprobs in (None, 0):
        world = World(None, most=5)
        world.wrong = [place % 9 < 4 for place in range(2010)]
        sampler = Sampler(SamplingParams(temperature=0, logprobs=logprobs))
        assert list(world.generate(300, sampler)) == world.text[START + 1 : START + 301]
        logs.append(world.log)
    assert logs[0] == logs[1]
    assert len({tokens for _, tokens in logs[0]}) > 2


def test_drafts_that_do_not_pay_rest_until_the_window_before_their_next_trial() -> None:
    world = World(None, most=5, context=2000)
    world.wrong = [True] * 2010
    tokens = world.generate_with_rests(1500)
    assert list(tokens) == world.text[START + 1 : START + 1501]
    world.expect_at(START + 1500)
    assert world.tally.stats().tokens == 1500
    lengths = [tokens for _, tokens in world.log]
    runs = [(tokens, len([*same])) for tokens, same in groupby(lengths)]
    # Both trials of a number, with a step in the queue that is known too late, then none, alone,
    # and the window again with its rows.
    rests = [count for tokens, count in runs if tokens == 0]
    assert rests[:3] == [pause - WINDOW for pause in (128, 256, 512)]
    behind = [runs[place + 1 : place + 3] for place, run in enumerate(runs) if run[0] == 0][:3]
    assert [[tokens for tokens, _ in run] for run in behind] == [[1, 6]] * 3
    assert all(run[0][1] == WINDOW for run in behind)


def test_a_caller_that_leaves_while_drafts_rest_leaves_the_tokens_it_took() -> None:
    world = World(None, most=5, context=2000)
    world.wrong = [True] * 2010
    tokens = world.generate_with_rests(1500)
    for _ in range(60):
        next(tokens)
    assert world.log[-1][1] == 0
    tokens.close()
    world.expect_at(START + 60)
    assert world.state.draft is not None
    assert not world.state.draft.covers(START + 60)


def test_the_host_is_a_step_behind_where_caches_can_take_two_steps_back() -> None:
    for drafts, ahead in ((5, 2), (6, 1)):
        world = World(drafts, most=7)
        tokens = world.generate(60)
        next(tokens)
        assert len(world.log) == ahead
        tokens.close()


def test_nan_of_a_draft_is_run_again_without_drafts() -> None:
    world = World(5)
    world.nan[START + 9] = True
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert (START + 6, 6) in world.log
    assert (START + 6, 1) in world.log
    world.expect_at(START + 40)


def test_nan_without_drafts_ends_the_run_behind_the_token_that_met_it() -> None:
    world = World(5)
    world.nan[START + 9] = True
    world.text[START + 7] = NAN_TOKEN
    tokens = world.generate(40)
    assert [next(tokens) for _ in range(6)] == world.text[START + 1 : START + 7]
    with pytest.raises(FloatingPointError, match=f"NaN after {START + 7} tokens"):
        next(tokens)
    assert world.state.position == START + 7


def test_a_sequence_that_the_module_does_not_know_yet_makes_no_drafts() -> None:
    world = World(5)
    assert world.state.draft is not None
    world.state.draft.forget()
    world.state.draft.begin(START - 4, 4)
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert [tokens for _, tokens in world.log[:13]] == [1] * 12 + [6]
