"""The recorded steps of an engine with a draft module, and how they follow each other eagerly."""

from collections.abc import Callable, Generator, Sequence
from functools import partial

from torch import Tensor

from dsv4.launch.target import Target
from dsv4.model import Transformer
from dsv4.parallel.hand_off import HandOff
from dsv4.progress import Progress
from dsv4.run_stats import DraftStats
from dsv4.sampling import Sampler
from dsv4.speculative.block_loop import BLOCKS_AHEAD, BlockLoop, BlockQueue, Drafting
from dsv4.speculative.block_ring import AnyBlockRing, BlockRing, BlockRings
from dsv4.speculative.recorded_drafts import RecordedDrafts
from dsv4.speculative.resting import with_rests
from dsv4.speculative.tally import AskedDrafts, DraftCount, Tally, Usefulness
from dsv4.step.lock_step import AnyFeed, AnyStep
from dsv4.step.recorded import RecordedStep
from dsv4.step.step import Step
from dsv4.step.steps import RecordedSteps
from dsv4.step.token_loop import TokenLoop


class DraftedRecordedSteps(RecordedSteps):
    """``RecordedSteps`` whose ``following`` drafts; every step runs the module's rows.

    ``drafted``: how drafts did since the last ``first_token``. ``count``: of the drafts of a step.
    ``alone``: the step of one token without the module, where drafts may rest.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        alongs: Sequence[RecordedDrafts],
        prefill_tokens: int,
        drafts: AskedDrafts,
        max_context: int,
        compiling: Progress | None,
    ) -> None:
        """``alongs``: the module recorded for each of ``models``. ``drafts``: as of
        ``dsv4.speculative.steps.DraftedSteps``; ``max_context``: tokens that the caches hold; the
        others as of ``RecordedSteps``.
        """
        self.alongs = tuple(alongs)
        self.along = self.alongs[0]
        state = self.along.state
        scope = self.along.module.scope
        self.count = DraftCount.asked(drafts, scope.most, scope.trained_block)
        super().__init__(models, state, self.along.table, prefill_tokens, compiling, alongs)
        for along in alongs:
            along.ready(Target.of(along.head))
        self._drafts: dict[int, AnyStep] = {}
        self._passed_on = [
            HandOff(self.head, rejected_1)
            for device, rejected_1 in state.rejected_1.items()
            if device != self.head
        ]
        ring = self._block_ring()
        self.blocks = BlockLoop(state, self.sampler, ring, max_context, self._pass_on_rejected)
        self.drafted = Tally(scope.most)
        self._usefulness = Usefulness()
        # Nothing is built inside the first ``generate``.
        for count in self.count.possible:
            self.draft_step(count)
            self.step(count + 1)
        self.alone: AnyStep | None = None
        if self.count.may_rest:
            self.alone = self._ready([rank.record(1, alone=True) for rank in self.ranks])

    def draft_step(self, count: int) -> AnyStep:
        """The step that makes ``count`` drafts, on every rank."""
        if count not in self._drafts:
            pairs = zip(self.recorded_draft_steps(count), self.ranks, strict=True)
            self._drafts[count] = self.joined([Step(step, rank.memory, {}) for step, rank in pairs])
        return self._drafts[count]

    def recorded_draft_steps(self, count: int) -> list[RecordedStep]:
        """What every rank records of it."""
        return [
            along.draft_step(rank.targets, rank.sampler, count)
            for along, rank in zip(self.alongs, self.ranks, strict=True)
        ]

    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """See ``RecordedSteps``; a new run begins, which has drafted nothing."""
        self.drafted = Tally(self.along.module.scope.most)
        return super().first_token(sampler, hidden_TE)

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, several for each step of which drafts stay."""
        yield from self.follow(token, sampler, steps, EagerBlocks(self))

    def draft_stats(self) -> DraftStats:
        """See ``RecordedSteps``."""
        return self.drafted.stats()

    def follow(
        self,
        token: int,
        sampler: Sampler,
        steps: int,
        queue: BlockQueue,
        drafting: Drafting | None = None,
    ) -> Generator[int, None, None]:
        """``following`` by steps that ``queue`` queues; ``drafting`` None: as the engine does."""
        count = self.count.for_run(sampler.params.temperature == 0)
        drafting = drafting or Drafting(count, self.drafted)
        assert self.state.draft is not None
        tokens = with_rests(
            token,
            steps,
            drafting,
            self.state.draft,
            lambda last, room: self.blocks.generate(last, sampler, room, queue, drafting),
            lambda last, room: queue.alone(last, sampler, room),
        )
        try:
            yield from tokens
        finally:
            tokens.close()
            self._usefulness.judge(self.drafted.stats())

    def follow_alone(
        self, token: int, sampler: Sampler, steps: int, queue: Callable[[int], None]
    ) -> Generator[int, None, None]:
        """Yields the tokens behind ``token`` by ``alone``, which ``queue`` queues."""
        assert self.alone is not None
        loop = TokenLoop(self.alone, self.state, self.sampler, self.ring)
        return loop.generate(token, sampler, steps, queue)

    def _block_ring(self) -> AnyBlockRing:
        rings = [BlockRing(one.memory.ring_3R, one.head, BLOCKS_AHEAD) for one in self.alongs]
        return rings[0] if self.agreeing is None else BlockRings(rings, self.agreeing.fault_4)

    def _pass_on_rejected(self) -> None:
        for hand_off in self._passed_on:
            hand_off.send(self.state.rejected_1[self.head])


class EagerBlocks:
    """``BlockQueue`` item by item."""

    def __init__(self, steps: DraftedRecordedSteps) -> None:
        self._steps = steps

    def draft(self, count: int) -> None:
        """See ``BlockQueue``."""
        step = self._steps.draft_step(count)
        self._steps.queue(step, step.tokens)

    def verify(self, tokens: int, end: int) -> None:
        """See ``BlockQueue``."""
        step = self._steps.step(tokens)
        if tokens == 1:
            self._steps.queue_with_choice(step, end)
            return
        # For an observer the step has begun with its drafts.
        observer = self._steps.observer
        step.run(tokens, end, observer)
        step.sample(observer)

    def feed(self, tokens: int) -> AnyFeed:
        """See ``BlockQueue``."""
        feed = self._steps.step(tokens).feed
        assert feed is not None, "decode steps have inputs"
        return feed

    def logits(self, tokens: int) -> Tensor:
        """See ``BlockQueue``."""
        return self._steps.step(tokens).logits_TV

    def alone(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """See ``BlockQueue``."""
        step = self._steps.alone
        assert step is not None
        queue = partial(self._steps.queue_with_choice, step)
        return self._steps.follow_alone(token, sampler, steps, queue)
