"""DraftedDecoder on stand-ins for streams and steps: where drafts are captured, and what of a step
is a replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.decode import cuda_graph_decoder
from dsv4.decode.drafted_decoder import DraftedDecoder
from dsv4.sampling import Sampler, SamplingParams
from dsv4.speculative.tally import DraftCount
from tests.decode.quiet_cuda import quiet_cuda
from tests.step.test_token_loop import World

GREEDY = Sampler(SamplingParams(temperature=0))


class Device:
    """Steps that count where they stand, of 2 drafts where they are captured, and what is done."""

    def __init__(self, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = World().state
        self.state.set_position(position)
        (self.position_1,) = self.state.positions_1.values()
        self.ran: list[tuple[str, int]] = []
        self.log: list[object] = []
        self.entered: list[object] = []
        quiet_cuda(monkeypatch, self.on_stream)
        monkeypatch.setattr(cuda_graph_decoder, "CapturedStep", self.captured)
        self.steps: Any = SimpleNamespace(
            state=self.state,
            head=torch.device("cpu"),
            count=DraftCount((2,)),
            alone=None,
            observer=None,
            step=lambda tokens: self.step("verify", tokens),
            draft_step=lambda count: self.step("draft", count),
            queue=lambda step, tokens: self.log.append(("queued", step.name, tokens)),
            follow=self.follow,
            follow_alone=self.follow_alone,
        )

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.pop()

    def step(self, name: str, tokens: int) -> Any:
        def run(tokens: int, *_: object) -> None:
            self.ran.append((f"{name} {tokens}", int(self.position_1)))
            self.position_1.add_(tokens)

        return SimpleNamespace(
            name=f"{name} {tokens}",
            tokens=tokens,
            feed=SimpleNamespace(put=lambda ids: None, name=f"input of {tokens}"),
            logits_TV=torch.zeros(tokens, 3),
            run=run,
            recorded=SimpleNamespace(ends=lambda max_context: [100, max_context]),
            sample=lambda *_: self.log.append(("chosen", name, tokens)),
        )

    def captured(self, step: Any, *_: object) -> Any:
        return SimpleNamespace(
            step=step,
            run=lambda end: self.log.append(("replayed", step.name, end)),
            run_and_sample=lambda end: self.log.append(("replayed and chosen", step.name, end)),
        )

    def follow(self, *asked: object) -> Iterator[int]:
        self.log.append(asked)
        assert self.entered, "on the own streams"
        yield 7

    def follow_alone(self, token: int, sampler: Sampler, steps: int, queue: Any) -> Iterator[int]:
        assert (token, sampler, steps) == (3, GREEDY, 9)
        queue(50)
        yield 8


@pytest.mark.parametrize("position", [0, 1, 30])
def test_drafts_are_captured_behind_a_token(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classic MTP drafts from the row of the position before, which the first token has not."""
    device = Device(position, monkeypatch)
    decoder = DraftedDecoder(device.steps, "full", 512)
    # Dense and not, each at the same place.
    verified = [("verify 1", position)] * 2 + [("verify 3", position)] * 2
    assert device.ran == [*verified, ("draft 2", max(1, position))]
    assert device.state.position == int(device.position_1) == position
    assert decoder.lengths == (1, 3)
    assert decoder.draft(2) is not None
    assert decoder.draft(3) is None
    # Of as many tokens as there is room for, none is a draft that another one verifies.
    assert DraftedDecoder(device.steps, "full", position + 2).lengths == (1,)
    assert DraftedDecoder(device.steps, "full", position + 3).lengths == (1, 3)


def test_what_is_captured_is_replayed_and_the_rest_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(30, monkeypatch)
    queue = DraftedDecoder(device.steps, "full", 512).blocks()
    device.log.clear()
    queue.draft(2)
    queue.verify(3, 77)
    assert device.log == [("replayed", "draft 2", 512), ("replayed and chosen", "verify 3", 77)]
    device.log.clear()
    device.ran.clear()
    queue.draft(1)
    queue.verify(2, 77)
    assert device.log == [("queued", "draft 1", 1), ("chosen", "verify", 2)]
    assert device.ran == [("verify 2", 30)]
    feed: Any = queue.feed(3)
    assert (feed.name, queue.logits(3).shape) == ("input of 3", (3, 3))


def test_steps_alone_are_replays_of_a_step_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(30, monkeypatch)
    device.steps.alone = device.step("alone", 1)
    queue = DraftedDecoder(device.steps, "full", 512).blocks()
    device.log.clear()
    assert list(queue.alone(3, GREEDY, 9)) == [8]
    assert device.log == [("replayed and chosen", "alone 1", 50)]


def test_a_run_is_made_on_the_own_streams_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(30, monkeypatch)
    decoder = DraftedDecoder(device.steps, "full", 512)
    with pytest.raises(ValueError, match=r"position: found 30 \+ 483 tokens, expected at most 512"):
        next(decoder.generate(3, GREEDY, 483))
    device.log.clear()
    assert list(decoder.generate(3, GREEDY, 482)) == [7]
    queue: Any = decoder.blocks()
    drafting: Any = object()
    assert list(decoder.following(3, GREEDY, 5, queue, drafting)) == [7]
    first, second = device.log
    assert isinstance(first, tuple)
    assert (*first[:3], first[4]) == (3, GREEDY, 482, None)
    assert second == (3, GREEDY, 5, queue, drafting)
