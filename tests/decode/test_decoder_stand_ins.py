"""CUDAGraphDecoder on stand-ins for streams and captured steps: what it takes back."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.decode import CUDAGraphDecoder, cuda_graph_decoder
from dsv4.limits import STEPS_AHEAD
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.token_loop import TokenLoop
from tests.decode.quiet_cuda import quiet_cuda
from tests.step.test_token_loop import START, World

GREEDY = Sampler(SamplingParams(temperature=0))


def decoder_on(world: World, monkeypatch: pytest.MonkeyPatch) -> CUDAGraphDecoder:
    """A decoder of one token a step that replays the steps of ``world``."""

    (position_1,) = world.state.positions_1.values()

    def run(end: int) -> None:
        world.log.append("run")
        assert end == int(position_1) + 1
        position_1.add_(1)

    def run_and_sample(end: int) -> None:
        run(end)
        world.queue(end)

    def captured(step: Any, *_: object) -> SimpleNamespace:
        return SimpleNamespace(step=step, run=run, run_and_sample=run_and_sample)

    quiet_cuda(monkeypatch)
    monkeypatch.setattr(cuda_graph_decoder, "CapturedStep", captured)
    world.step.tokens = 1
    world.step.recorded = SimpleNamespace(ends=lambda max_context: [max_context])
    world.step.run = lambda tokens, end: None
    world.step.sample = lambda: None
    ring = SimpleNamespace(mark=world.mark, read=world.read)
    steps: Any = SimpleNamespace(
        state=world.state,
        head=torch.device("cpu"),
        sampler=world.sampler,
        ring=ring,
        step=lambda tokens: world.step,
    )
    decoder = CUDAGraphDecoder(steps, "full", 512)
    world.log.clear()
    return decoder


def test_closing_takes_back_at_once_what_was_queued_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when the collector comes to it: somebody may still look at the loop."""
    seen: list[object] = []
    generate: Callable[..., Any] = TokenLoop.generate

    def watched(loop: TokenLoop, *arguments: Any) -> Any:
        seen.append(generate(loop, *arguments))
        return seen[-1]

    monkeypatch.setattr(TokenLoop, "generate", watched)
    world = World()
    tokens = decoder_on(world, monkeypatch).generate(7, GREEDY, 50)
    assert [next(tokens) for _ in range(3)] == [8, 9, 10]
    assert world.state.position == START + 2 + STEPS_AHEAD
    tokens.close()
    (position_1,) = world.state.positions_1.values()
    assert world.state.position == int(position_1) == START + 3


def test_more_tokens_than_the_context_has_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_on(World(), monkeypatch)
    expected = rf"position: found {START} \+ {513 - START} tokens, expected at most 512"
    with pytest.raises(ValueError, match=expected):
        next(decoder.generate(3, GREEDY, 513 - START))
    assert next(decoder.generate(3, GREEDY, 512 - START)) == 4


def test_a_replay_takes_rejected_tokens_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    decoder = decoder_on(world, monkeypatch)
    (position_1,) = world.state.positions_1.values()
    for position in (START, START + 1, START):
        decoder.replay(3, position)
        assert world.state.position == int(position_1) == position + 1
    assert world.log == ["put", "run"] * 3
    with pytest.raises(ValueError, match=f"position: found {START + 2}"):
        decoder.replay(3, START + 2)


def test_an_interrupted_replay_leaves_the_device_where_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    decoder = decoder_on(world, monkeypatch)
    (position_1,) = world.state.positions_1.values()

    def interrupted(end: int) -> None:
        position_1.fill_(end)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder._captured[1], "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.replay(3, START)
    assert world.state.position == int(position_1) == START
    decoder.replay(3, START)
    assert world.state.position == int(position_1) == START + 1
