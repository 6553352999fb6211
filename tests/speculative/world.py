"""A device of stand-ins for the loop of steps with drafts."""

from collections import deque
from types import SimpleNamespace
from typing import Any

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


class ChangingCount(DraftCount):
    """These numbers of drafts, one after the other, and then the last again and again."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers[-1:])
        self._numbers = numbers

    @property
    def now(self) -> int:
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


class World:
    """A device that computes when it is told to: ``text`` is what the model says at each place, a
    draft there is right but where ``wrong`` is true. Where ``nan`` is true drafts bring NaN.
    """

    def __init__(self, drafts: int | None, most: int = 5, context: int = 400) -> None:
        self.text = [(7 * place + 3) % 251 for place in range(2010)]
        self.wrong = [False] * 2010
        self.nan = [False] * 2010
        self.log: list[Any] = []
        # What is queued of steps, and how long the sequence may be behind each.
        self.queued: list[str] = []
        self.ends: list[int] = []
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
        # The ring as it is when a step is done: the host may look at once.
        self._unread: deque[torch.Tensor] = deque()
        self.sampler = SamplerState.allocate(CPU)
        ring: Any = self
        self.loop = BlockLoop(self.state, self.sampler, ring, context, self.rejected)

    def generate(self, steps: int, sampler: Sampler = GREEDY) -> Any:
        queue: Any = self
        token = self.text[START]
        return self.loop.generate(token, sampler, steps, queue, Drafting(self.count, self.tally))

    def logits(self, tokens: int) -> torch.Tensor:
        """Of the step that was queued last: it has written over those of the one before."""
        first, queued = self.log[-1]
        assert tokens == queued
        logits_TV = torch.zeros(tokens, 251)
        logits_TV[range(tokens), self.text[first + 1 : first + 1 + tokens]] = 1.0
        return logits_TV

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
            assert not self.state.met_nan, "a step alone would store no token"
            self.state.advance(1)
            self.state.set_position(position + 1)
            self.log.append((position, 0))
            token = self.text[position + 1]
            yield token

    # The queue.
    def feed(self, tokens: int) -> Any:
        return SimpleNamespace(put=self.put, pass_on=lambda: self.queued.append("pass on"))

    def put(self, tokens: list[int]) -> None:
        self.next_1.fill_(tokens[0])

    def draft(self, count: int) -> None:
        self.queued.append("draft")
        first = int(self.place[0] - self.place[1]) + 1
        self._drafts = [
            (self.text[place] + self.wrong[place]) % 251 for place in range(first, first + count)
        ]

    def verify(self, tokens: int, end: int) -> None:
        self.queued.append("verify")
        self.ends.append(end)
        position_1, rejected_1 = self.place
        first = int(position_1 - rejected_1)
        assert int(self.next_1) == max(self.text[first], 0), "the step reads the last token"
        assert first + tokens <= end, "the sequence may be so long behind it"
        self.log.append((first, tokens))
        if any(self.nan[first + 1 : first + tokens]):
            self.state.nan_1.fill_(1)
        position_1.fill_(first + tokens)
        rejected_1.zero_()
        self._settle(tokens)

    def _settle(self, tokens: int) -> None:
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
        nan_1 = self.state.nan_1
        settle_block(judged, behind, self.place, self.next_1, self.ring_3R, nan_1)

    def rejected(self) -> None:
        self.queued.append("rejected")

    # The ring.
    def begin(self) -> None:
        self.queued.append("begin")
        self._unread.append(torch.empty(0))
        assert len(self._unread) <= 2

    def mark_drafted(self) -> None:
        self.queued.append("drafted")

    def mark_settled(self) -> None:
        self.queued.append("settled")
        self._unread[-1] = self.ring_3R.clone()

    def read(self, position: int) -> Given:
        ring_3R = self._unread.popleft()
        count, drafted = (int(ring_3R[row, position % SLOTS]) for row in (1, 2))
        places = range(position + 1, position + 1 + count)
        tokens = [int(ring_3R[0, place % SLOTS]) for place in places]
        return Given(tokens, drafted, (0.25, 1.0))

    def forget(self) -> None:
        self._unread.clear()

    def expect_at(self, position: int) -> None:
        """Host and device stand there, with nothing pending."""
        assert self.state.position == position
        assert [int(tensor) for tensor in self.place] == [position, 0]
        assert self.state.furthest == max(first + max(1, tokens) for first, tokens in self.log)
