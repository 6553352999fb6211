"""Steps, decoders and engines beside each other on a GPU: in whatever order they are used, each
gives what it gives alone, and nothing is allocated or captured on the way.
"""

import gc
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.sampling import Sampler
from tests.decode.demo import (
    GREEDY,
    MODES,
    PROMPTS,
    assert_same_logits,
    assert_same_state,
    decoder_of,
    load,
    snapshot,
    start,
    steps_of,
)
from tests.gpu_counts import gpu_counts

pytestmark = pytest.mark.gpu

IDS = (PROMPTS["recall_128"] * 4)[:700]
LENGTHS = (1, 5, 8)
GPUS = gpu_counts(1, 2)


@dataclass(frozen=True)
class Move:
    """A step of ``tokens`` tokens, of which ``rejected`` are taken back after it."""

    tokens: int
    rejected: int


@dataclass(frozen=True)
class Ways:
    """An engine and decoders that replay steps on its state."""

    engine: Engine
    decoders: tuple[CUDAGraphDecoder, ...]

    def runs(self) -> list[Callable[[Sequence[int]], Tensor]]:
        """The ways to run a step at the current position: eagerly, and by every decoder."""

        def replayed(decoder: CUDAGraphDecoder) -> Callable[[Sequence[int]], Tensor]:
            return lambda ids: decoder.replay(ids, self.engine.position)

        return [steps_of(self.engine).decode, *map(replayed, self.decoders)]


@pytest.fixture(scope="module", params=GPUS)
def ways(request: pytest.FixtureRequest) -> Ways:
    """Three decoders on one state: two modes of all lengths, and another of one token."""
    engine = load(gpus=request.param)
    decoders = [decoder_of(engine, mode, LENGTHS) for mode in MODES]
    decoders.append(decoder_of(engine, "full"))
    return Ways(engine, tuple(decoders))


@pytest.fixture(scope="module")
def alone() -> Engine:
    """Another engine, on one GPU and without decoders."""
    return load()


def random_moves(seed: int, count: int) -> list[Move]:
    """Steps of the captured lengths; drafts are rejected as far as the caches reach back."""
    rng = random.Random(seed)
    moves = []
    for _ in range(count):
        tokens = rng.choice(LENGTHS)
        moves.append(Move(tokens, rng.randint(0, tokens - 1) if tokens > 1 else 0))
    return moves


def play(
    engine: Engine, moves: Sequence[Move], run: Callable[[Sequence[int]], Tensor]
) -> list[Tensor]:
    """The logits of every move; the host does not wait."""
    logits = []
    for move in moves:
        at = engine.position
        logits.append(run(IDS[at : at + move.tokens]).clone())
        if move.rejected:
            engine.rewind(move.rejected)
    return logits


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_eager_and_replayed_steps_is_the_eager_one(
    ways: Ways, alone: Engine, seed: int
) -> None:
    """Lengths, modes and rollbacks at random: logits, caches and positions are bit for bit those of
    the same steps run eagerly by an engine of its own.
    """
    moves = random_moves(seed, 60)
    rng = random.Random(seed)

    def run(ids: Sequence[int]) -> Tensor:
        able = [
            way
            for way, decoder in zip(ways.runs(), (None, *ways.decoders), strict=True)
            if decoder is None or len(ids) in decoder.lengths
        ]
        return rng.choice(able)(ids)

    start(alone, IDS[:118])
    start(ways.engine, IDS[:118])
    expected = play(alone, moves, steps_of(alone).decode)
    assert_same_logits(play(ways.engine, moves, run), expected)
    assert ways.engine.position == alone.position
    if len(ways.engine.state.devices) == 1:
        assert_same_state(snapshot(ways.engine), snapshot(alone))


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_are_rejected_leave_no_trace(ways: Ways, alone: Engine, seed: int) -> None:
    """Accepted are steps of one token only, among drafts of 5 and 8 that are all taken back: logits
    are those of the tokens one by one, and so are the caches once the last drafts are overwritten.
    """
    rng = random.Random(seed)
    accepted = 160
    start(alone, IDS[:118])
    expected = play(alone, [Move(1, 0)] * accepted, steps_of(alone).decode)
    start(ways.engine, IDS[:118])
    found = []
    for index in range(accepted):
        if index < accepted - 8 and rng.random() < 0.5:
            draft = rng.choice((5, 8))
            play(ways.engine, [Move(draft, draft)], rng.choice(ways.runs()[:3]))
        found += play(ways.engine, [Move(1, 0)], rng.choice(ways.runs()))
    assert_same_logits(found, expected)
    if len(ways.engine.state.devices) == 1:
        assert_same_state(snapshot(ways.engine), snapshot(alone))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rejected", [0, 1, 3, 7])
def test_tokens_rejected_on_the_device_are_a_rollback(
    ways: Ways, rejected: int, tokens: int
) -> None:
    """By ``rejected_1``, which the next step takes back, as by ``rewind``: bit for bit."""
    engine = ways.engine
    for run in ways.runs()[:3]:
        results = []
        for on_device in (False, True):
            start(engine, IDS[:118])
            play(engine, [Move(8, 0)], run)
            if on_device:
                for device in engine.state.devices:
                    engine.state.rejected_1[device].fill_(rejected)
                engine.state.position -= rejected
            else:
                engine.rewind(rejected)
            logits = play(engine, [Move(tokens, 0)], run)
            results.append((logits, snapshot(engine), engine.position))
        (rewound, expected, position), (taken_back, found, moved_to) = results
        assert_same_logits(taken_back, rewound)
        assert_same_state(found, expected)
        assert position == moved_to == 126 - rejected + tokens


TWO_GPUS = [
    pytest.param({"gpus": 2, **settings}, marks=gpu_counts(2)[0].marks)
    for settings in (
        {},
        {"cuda_graph": "split"},
        {"cuda_graph": "full"},
        {"cuda_graph": "full", "parallel": "tensor"},
    )
]


@pytest.mark.parametrize(
    "settings", [{}, {"cuda_graph": "split"}, {"cuda_graph": "full"}, *TWO_GPUS]
)
def test_two_engines_in_turn_are_as_each_alone(settings: dict[str, Any]) -> None:
    """Token by token, nothing waited for in between: they share no counters and no buffers."""
    engines = [load(**settings), load(**settings)]
    prompts = [PROMPTS["stories"], PROMPTS["recall_128"]]
    pairs = list(zip(engines, prompts, strict=True))
    expected = [list(engine.generate(prompt, 48, GREEDY, ())) for engine, prompt in pairs]
    runs = [engine.generate(prompt, 48, GREEDY, ()) for engine, prompt in pairs]
    turns = list(chain.from_iterable(zip_longest(*runs)))
    assert [turns[0::2], turns[1::2]] == expected


@pytest.mark.parametrize("settings", [{}, {"cuda_graph": "full"}, *TWO_GPUS])
def test_two_engines_at_once_are_as_each_alone(settings: dict[str, Any]) -> None:
    """In two threads, on two streams, with kernels whose blocks wait for all others."""
    engines = [load(**settings), load(**settings)]
    prompts = [PROMPTS["stories"], PROMPTS["recall_128"]]
    start_together = Barrier(2)

    def answers(engine: Engine, prompt: list[int]) -> list[list[int]]:
        start_together.wait()
        with torch.cuda.stream(torch.cuda.Stream(engine.state.devices[0])):
            return [list(engine.generate(prompt, 200, GREEDY, ())) for _ in range(3)]

    pairs = list(zip(engines, prompts, strict=True))
    expected = [[list(engine.generate(prompt, 200, GREEDY, ()))] * 3 for engine, prompt in pairs]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answers, engines, prompts)) == expected


def test_two_engines_in_turn_give_the_same_bits() -> None:
    engines = [load(), load(cuda_graph="full")]
    texts = [IDS[:140], (PROMPTS["stories"] * 20)[:140]]

    def prepare() -> None:
        for engine, ids in zip(engines, texts, strict=True):
            start(engine, ids[:118])

    prepare()
    expected = [
        [engine.decode([token]) for token in ids[118:]]
        for engine, ids in zip(engines, texts, strict=True)
    ]
    prepare()
    found: list[list[Tensor]] = [[], []]
    for tokens in zip(*(ids[118:] for ids in texts), strict=True):
        for engine, token, logits in zip(engines, tokens, found, strict=True):
            logits.append(engine.decode([token]))
    for logits, reference in zip(found, expected, strict=True):
        assert_same_logits(logits, reference)


class Allocations:
    """How often and how much torch has allocated on every device of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._devices = engine.state.devices
        self.before = self.now()

    def now(self) -> list[tuple[int, int]]:
        """(allocations so far, bytes allocated) by device, of this process."""
        found = []
        for device in self._devices:
            statistics = torch.cuda.memory_stats(device)
            calls = statistics["allocation.all.allocated"]
            found.append((calls, torch.cuda.memory_allocated(device)))
        return found


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_captured_or_allocated_inside_the_first_generate(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(cuda_graph=mode)
    gc.collect()
    before = torch.cuda.memory_allocated()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a graph was captured after the engine was built")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    produced = []
    for token in engine.generate(PROMPTS["stories"], 24, GREEDY, stop_token_ids=()):
        produced.append(token)
        assert torch.cuda.memory_allocated() == before, f"token {len(produced)}"
    assert len(produced) == 24


def test_no_step_allocates(ways: Ways) -> None:
    """Decode of every length, replays, sampling and eager chunks of a prompt, after one of each."""
    engine = ways.engine
    steps = steps_of(engine)
    sampler = Sampler(GREEDY)

    def everything() -> None:
        engine.reset()
        for chunk in (IDS[:300], IDS[300:310], IDS[310:330]):
            steps.run(chunk)
        for tokens in LENGTHS:
            for run in ways.runs()[:3]:
                at = engine.position
                run(IDS[at : at + tokens])
        for follow in (steps.following, *(decoder.generate for decoder in ways.decoders)):
            assert len(list(follow(7, sampler, 6))) == 6

    everything()
    gc.collect()
    allocations = Allocations(engine)
    everything()
    assert allocations.now() == allocations.before
