"""The recorded steps of an engine, side by side on one state: decode steps by length, prefill,
logits.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.launch.compiler import compile_ahead
from dsv4.layers.values import Wants, Watch
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Transformer
from dsv4.ops.tables import RecordedTable
from dsv4.progress import Progress
from dsv4.run_stats import DraftStats
from dsv4.sampling import Sampler, checked_token
from dsv4.step.along import Along
from dsv4.step.lock_step import AnyStep, JoinedValues, LockStep, Rings, Samplers
from dsv4.step.observer import Observer
from dsv4.step.rank_steps import RankSteps
from dsv4.step.recorded import RecordedStep, log_unusual_kernels
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed
from dsv4.step.token_loop import TokenLoop
from dsv4.step.traced_values import TracedValues


class RecordedSteps:
    """Every step of an engine. Steps share one workspace per device, so each overwrites what the
    one before returned; logits of hidden states have memory of their own. ``observer`` sees them,
    item by item. ``agreeing``: what a rank shares with the others, where all of them are there.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        state: DecodeState,
        table: RecordedTable,
        prefill_tokens: int,
        compiling: Progress | None = None,
        alongs: Sequence[Along] = (),
    ) -> None:
        """``models`` of all ranks, on ``state.ranks``; ``alongs``: what runs along with each.

        Records the decode steps of one and of 8 tokens and the prefill step of up to
        ``prefill_tokens``, compiles their kernels (``compiling(done, total)`` is told) and makes
        the memory that each fits into. Steps but those of one token and of prefill are built when
        they are first run.
        """
        self.model = models[0]
        self.state = state
        self.table = table
        self.observer: Observer | None = None
        self.head = self.model.head_device
        ranks = zip(models, state.ranks, alongs or [None] * len(models), strict=True)
        self.ranks = [RankSteps(of, own, table, along) for of, own, along in ranks]
        first = self.ranks[0]
        alone = len(self.ranks) == 1
        self.sampler = first.sampler if alone else Samplers([rank.sampler for rank in self.ranks])
        peers = state.peers
        # Without the results of absent ranks each rank chooses another token.
        self.agreeing = peers if peers is not None and peers.ranks == len(self.ranks) else None
        self.ring = first.ring
        if self.agreeing is not None:
            self.ring = Rings([rank.ring for rank in self.ranks], self.agreeing.fault_4)
        self._prefill_tokens = prefill_tokens
        self._steps: dict[int, AnyStep] = {}
        self._logits: dict[int, tuple[AnyStep, list[Tensor]]] = {}
        lengths = [1, MAX_DECODE_TOKENS]
        if prefill_tokens > MAX_DECODE_TOKENS:
            lengths.append(prefill_tokens)
        recorded = {tokens: [rank.record(tokens) for rank in self.ranks] for tokens in lengths}
        own = [rank.own_steps() for rank in self.ranks]
        steps = [step for found, apart in own for step in (*found, *apart)]
        steps += [step for found in recorded.values() for step, _ in found]
        compile_ahead({kernel for step in steps for kernel in step.kernels()}, compiling)
        log_unusual_kernels(steps)
        for index, rank in enumerate(self.ranks):
            rank.allocate([*own[index][0], *(found[index][0] for found in recorded.values())])
        # The step of 8 tokens says how much memory decoding takes at most; it is built when it is
        # first run.
        del recorded[MAX_DECODE_TOKENS]
        for tokens, found in recorded.items():
            self._steps[tokens] = self._ready(found)
        self.loop = TokenLoop(self.step(1), state, self.sampler, self.ring)
        # The first token of a prompt comes of it: nothing is built inside the first ``generate``.
        self._logits_step(1)

    def step(self, tokens: int) -> AnyStep:
        """The step that runs this many tokens: of exactly as many up to 8, else the prefill step.

        With ops of torch among its own a prefill step serves one length; only the last one is kept.
        """
        length = self._length(tokens)
        if length not in self._steps:
            if length > MAX_DECODE_TOKENS:
                for other in [key for key in self._steps if key > MAX_DECODE_TOKENS]:
                    del self._steps[other]
            self._steps[length] = self._build(length)
        return self._steps[length]

    def traced_step(self, tokens: int, wants: Wants) -> AnyStep:
        """A decode step that keeps its values on the device (``Step.show``)."""
        return self._build(tokens, [TracedValues(wants, self.state) for _ in self.ranks])

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens: final hidden states ``[T, E]``, overwritten by the next step."""
        return self._run(self.step(len(token_ids)), token_ids).hidden_TE[: len(token_ids)]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends 1 to 8 tokens: float32 logits ``[T, V]``, overwritten by the next step."""
        return self._run(self.step(len(token_ids)), token_ids).logits_TV

    def traced(self, watch: Watch) -> Callable[[Sequence[int]], Tensor]:
        """``run`` in steps of their own, which show ``watch`` their values."""
        built: dict[int, AnyStep] = {}

        @torch.inference_mode()
        def run(token_ids: Sequence[int]) -> Tensor:
            length = self._length(len(token_ids))
            if length not in built:
                joined = JoinedValues(watch.seen, len(self.ranks))
                traced = [
                    TracedValues(watch.wants, self.state, joined.of(rank))
                    for rank in range(len(self.ranks))
                ]
                built[length] = self._build(length, traced, logits=False)
            return self._run(built[length], token_ids).hidden_TE[: len(token_ids)]

        return run

    @torch.inference_mode()
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """float32 ``[T, V]`` of the final hidden states of 1 to 8 tokens, which stay; overwritten
        by the next logits. Of more see ``logits_in_parts``.
        """
        return self._run_logits(hidden_TE).logits_TV

    @torch.inference_mode()
    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """The token behind a prompt whose last hidden state is the last row.

        Raises ``FloatingPointError`` for NaN.
        """
        self.sampler.load(sampler)
        step = self._run_logits(hidden_TE[-1:])
        step.sample(self.observer)
        token = checked_token(int(step.token), self.state.position, self.state.met_nan)
        sampler.note(step.logits_TV[-1], step.token)
        return token

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, one step each, sampled on the device."""
        queue = partial(self.queue_with_choice, self.step(1))
        with closing(self.loop.generate(token, sampler, steps, queue)) as tokens:
            yield from tokens

    def draft_stats(self) -> DraftStats | None:
        """How drafts did in the last run; None: nothing drafts."""
        return None

    def queue(self, step: AnyStep, tokens: int, end: int | None = None) -> None:
        """Queues a step item by item; ``end``: as of ``Step.run``."""
        if self.observer is not None:
            self.observer.begin_step()
        step.run(tokens, end, self.observer)

    def queue_with_choice(self, step: AnyStep, end: int) -> None:
        """Queues a step of one token and the choice of the next one."""
        self.queue(step, 1, end)
        step.sample(self.observer)

    def _run(self, step: AnyStep, token_ids: Sequence[int]) -> AnyStep:
        assert step.feed is not None
        step.feed.put(token_ids)
        with self.state.appending():
            self.state.advance(len(token_ids))
            self.queue(step, len(token_ids), self.state.position)
        return step

    def _run_logits(self, hidden_TE: Tensor) -> AnyStep:
        rows = hidden_TE.shape[0]
        step, inputs = self._logits_step(rows)
        for rows_TE in inputs:
            rows_TE[:rows].copy_(hidden_TE)
        with self.state.staying():
            step.run(rows, observer=self.observer)
        return step

    def _logits_step(self, rows: int) -> tuple[AnyStep, list[Tensor]]:
        """The step for the logits of this many hidden states, and its inputs by rank."""
        assert 1 <= rows <= MAX_DECODE_TOKENS, "the plan counts the logits of no more tokens"
        if rows not in self._logits:
            built = [rank.logits_step(rows) for rank in self.ranks]
            step = self.joined([step for step, _ in built])
            self._logits[rows] = step, [rows_TE for _, rows_TE in built]
        return self._logits[rows]

    def _length(self, tokens: int) -> int:
        """The length of the step that runs this many tokens."""
        exact = self.table.exact or tokens <= MAX_DECODE_TOKENS
        return tokens if exact else self._prefill_tokens

    def _build(
        self, tokens: int, traced: Sequence[TracedValues] | None = None, logits: bool = True
    ) -> AnyStep:
        """``traced``: where the values of each rank go."""
        ranks_traced = traced or [None] * len(self.ranks)
        recorded = [
            rank.record(tokens, values, logits)
            for rank, values in zip(self.ranks, ranks_traced, strict=True)
        ]
        compile_ahead({kernel for step, _ in recorded for kernel in step.kernels()})
        return self._ready(recorded, apart=traced is not None and traced[0].keeps)

    def _ready(
        self, recorded: Sequence[tuple[RecordedStep, TokenFeed]], apart: bool = False
    ) -> AnyStep:
        pairs = zip(self.ranks, recorded, strict=True)
        return self.joined([rank.ready(step, feed, apart) for rank, (step, feed) in pairs])

    def joined(self, steps: list[Step]) -> AnyStep:
        """The same step of every rank as one."""
        return steps[0] if len(steps) == 1 else LockStep(steps, self.state)
