"""Steps with drafts as replays of captured graphs."""

from collections.abc import Generator

import torch
from torch import Tensor

from dsv4.decode.cuda_graph_decoder import CUDAGraphDecoder
from dsv4.sampling import Sampler
from dsv4.speculative.block_loop import BlockQueue, Drafting
from dsv4.speculative.recorded_steps import DraftedRecordedSteps, EagerBlocks
from dsv4.step.captured import AnyCaptured, Mode
from dsv4.step.lock_step import AnyFeed


class DraftedDecoder(CUDAGraphDecoder):
    """``CUDAGraphDecoder`` that drafts, of ``drafted_steps``. Steps of other lengths than were
    captured are queued item by item.
    """

    def __init__(self, steps: DraftedRecordedSteps, mode: Mode, max_context: int) -> None:
        """Captures the numbers of drafts that steps may have (``steps.count``), as far as the
        context has room.
        """
        room = max_context - steps.state.position
        counts = [count for count in steps.count.possible if count < room]
        super().__init__(steps, mode, max_context, (1, *(count + 1 for count in counts)))
        self.drafted_steps = steps
        self._drafts = {count: self._capture_draft(count) for count in counts}
        self.alone = None if steps.alone is None else self._capture(steps.alone)

    def _capture_draft(self, count: int) -> AnyCaptured:
        step = self.drafted_steps.draft_step(count)
        with self._capturing():
            # A module may run a row of the position before: drafts have a token in front of them.
            self.state.set_position(max(1, self.state.position))
            step.run(step.tokens)
            return self._captured_step(step)

    def blocks(self) -> BlockQueue:
        """What queues steps as replays."""
        return _CapturedBlocks(self)

    def following(
        self,
        token: int,
        sampler: Sampler,
        steps: int,
        queue: BlockQueue,
        drafting: Drafting | None = None,
    ) -> Generator[int, None, None]:
        """``generate`` by steps that ``queue`` queues, as ``DraftedRecordedSteps.follow``."""
        follow = self.drafted_steps.follow
        yield from self._on_streams(follow(token, sampler, steps, queue, drafting))

    @torch.inference_mode()
    def generate(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens that follow ``token``, several for each step of which drafts stay; else
        as ``CUDAGraphDecoder.generate``.
        """
        self._check_room(self.state.position, steps)
        yield from self.following(token, sampler, steps, self.blocks())

    def draft(self, count: int) -> AnyCaptured | None:
        """The captured step that makes so many drafts."""
        return self._drafts.get(count)

    def verify(self, tokens: int) -> AnyCaptured | None:
        """The captured step of the main model on so many tokens."""
        return self._captured.get(tokens)


class _CapturedBlocks:
    """``BlockQueue`` by replays."""

    def __init__(self, decoder: DraftedDecoder) -> None:
        self._decoder = decoder
        self._eager = EagerBlocks(decoder.drafted_steps)

    def draft(self, count: int) -> None:
        """See ``BlockQueue``."""
        captured = self._decoder.draft(count)
        if captured is None:
            self._eager.draft(count)
        else:
            captured.run(self._decoder.max_context)

    def verify(self, tokens: int, end: int) -> None:
        """See ``BlockQueue``."""
        captured = self._decoder.verify(tokens)
        if captured is None:
            self._eager.verify(tokens, end)
        else:
            captured.run_and_sample(end)

    def feed(self, tokens: int) -> AnyFeed:
        """See ``BlockQueue``."""
        return self._eager.feed(tokens)

    def logits(self, tokens: int) -> Tensor:
        """See ``BlockQueue``."""
        return self._eager.logits(tokens)

    def alone(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """See ``BlockQueue``."""
        captured = self._decoder.alone
        assert captured is not None
        follow = self._decoder.drafted_steps.follow_alone
        return follow(token, sampler, steps, captured.run_and_sample)
