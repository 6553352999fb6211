"""Checks of decode steps: none waits for the device, every region is captured, replays are the
eager steps bit by bit, and memory does not grow.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.decode import Mode
from dsv4.engine import Engine
from dsv4.measure.provenance import ROOT
from dsv4.model import Segment
from dsv4.step.steps import RecordedSteps

# Where the steps begin and how many there are: they complete windows of 4 tokens and, the sixth,
# one of 128.
START = 122
STEPS = 12
# How many of them are taken back and replayed once more.
REWOUND = 3
REPLAYS = 50


@dataclass(frozen=True)
class Check:
    """One row of the report. ``detail``: what was checked, or what went wrong."""

    name: str
    passed: bool
    detail: str


class Replayer(Protocol):
    """The part of ``CUDAGraphDecoder`` that the checks need."""

    @property
    def regions(self) -> Sequence[str]:
        """Names of what was captured."""
        ...

    def replay(self, token_ids: int, position: int) -> Tensor:
        """float32 logits ``[1, V]`` of the step that appends a token at ``position``."""
        ...


@dataclass(frozen=True)
class EagerRun:
    """Eager steps on a fresh sequence: the prompt, one token per step, logits ``[1, V]``, and the
    caches at the end.
    """

    prompt: list[int]
    tokens: list[int]
    logits: list[Tensor]
    caches: dict[str, Tensor]

    @classmethod
    def of(cls, engine: Engine) -> "EagerRun":
        """``engine`` must decode eagerly."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            engine.config.vocab_size, (START + STEPS,), generator=generator
        ).tolist()
        prompt = ids[:START]
        tokens = ids[START:]
        start_sequence(engine, prompt)
        logits = [engine.decode([token]) for token in tokens]
        caches = {name: cache.clone() for name, cache in cache_tensors(engine.state)}
        return cls(prompt, tokens, logits, caches)


def start_sequence(engine: Engine, prompt: list[int]) -> None:
    """A fresh sequence of ``prompt`` in caches of zeros, so that runs of equal steps leave equal
    bytes.
    """
    engine.reset()
    for _, cache in cache_tensors(engine.state):
        cache.zero_()
    engine.prefill(prompt)


def check_eager(engine: Engine, steps: RecordedSteps, run: EagerRun) -> Check:
    """One step, with its choice of a token, in which no torch call may wait for the device."""
    start_sequence(engine, run.prompt)

    def step() -> str:
        engine.decode(run.tokens[:1])
        steps.step(1).sample()
        return "no torch call waits, from the token ids to the choice of the next on the device"

    step()
    with no_synchronization():
        return attempt("eager host", step)


def check_capture(
    mode: Mode, engine: Engine, make: Callable[[], Replayer]
) -> tuple[Check, Replayer | None]:
    """The decoder of ``make``: every layer is captured, and the position is where it was."""
    made: list[Replayer] = []

    def capture() -> str:
        before = positions(engine.state)
        made.append(make())
        regions = made[0].regions
        missing = sorted(expected_regions(mode, engine.model.segments) - set(regions))
        if missing:
            found = ", ".join(regions)
            expected = ", ".join(missing)
            raise RuntimeError(f"regions: found {found}, expected {expected} as well")
        expect_positions(engine.state, before)
        counted = "1 region" if len(regions) == 1 else f"{len(regions)} regions"
        return f"{counted}, the position unchanged"

    check = attempt(f"{mode}: capture", capture)
    return check, made[0] if made else None


def expected_regions(mode: Mode, segments: Sequence[Segment]) -> set[str]:
    """Names of regions that together hold every layer, as far as ``mode`` captures it, the head and
    the choice of a token.
    """
    runs = [(segment.layers[0], segment.layers[-1]) for segment in segments]
    if mode == "full":
        *others, last = (f"layers {first} to {last}" for first, last in runs)
        return {*others, f"{last}, head, sample"}
    layers = [layer for segment in segments for layer in segment.layers]
    names = {f"layer {layer} graph {part}" for layer in layers for part in "AB"}
    return names | {f"layer {last} mix" for _, last in runs} | {"head, sample"}


def check_replay(mode: str, engine: Engine, decoder: Replayer, run: EagerRun) -> Check:
    """Replays of the eager run's steps give its logits and leave its caches and position, bit for
    bit; so do the last few once more after they were taken back.
    """
    end = START + len(run.tokens)

    def replay() -> str:
        start_sequence(engine, run.prompt)
        for position in [*range(START, end), *range(end - REWOUND, end)]:
            logits_TV = decoder.replay(run.tokens[position - START], position)
            eager_TV = run.logits[position - START]
            if not same_bits(logits_TV, eager_TV):
                difference = (logits_TV - eager_TV).abs().max()
                found = f"logits differ from the eager ones by up to {difference:.3g}"
                raise RuntimeError(f"position {position}: {found}")
        expect_positions(engine.state, [end] * len(positions(engine.state)))
        wrong = [
            name
            for name, cache in cache_tensors(engine.state)
            if not same_bits(cache, run.caches[name])
        ]
        if wrong:
            found = f"other bytes than after eager steps in {len(wrong)}, first in {wrong[0]}"
            raise RuntimeError(f"caches: found {found}")
        checked = f"logits and caches bit for bit at {START} to {end - 1}"
        return f"{checked}, the last {REWOUND} again after a rewind"

    return attempt(f"{mode}: replay", replay)


def check_replay_waits(mode: str, engine: Engine, decoder: Replayer, run: EagerRun) -> Check:
    """A replay in which no torch call may wait for the device."""
    start_sequence(engine, run.prompt)

    def replay() -> str:
        decoder.replay(run.tokens[0], START)
        return "no torch call waits"

    with no_synchronization():
        return attempt(f"{mode}: host", replay)


def check_memory(
    mode: str,
    engine: Engine,
    decoder: Replayer,
    run: EagerRun,
    memory: Callable[[], dict[str, int]],
) -> Check:
    """Nothing of what ``memory`` counts changes over replays."""

    def replay() -> str:
        start_sequence(engine, run.prompt)
        decoder.replay(run.tokens[0], START)
        before = memory()
        for index in range(1, REPLAYS + 1):
            decoder.replay(run.tokens[index % len(run.tokens)], START + index)
        after = memory()
        if after != before:
            raise RuntimeError(
                f"bytes: found {after} after {REPLAYS} replays, expected {before} as before them"
            )
        return f"{REPLAYS} replays neither allocate nor reserve a byte"

    return attempt(f"{mode}: memory", replay)


def attempt(name: str, action: Callable[[], str]) -> Check:
    """A passed check with what ``action`` returns, or a failed one with its ``RuntimeError`` and
    the line of this package that led to it.
    """
    try:
        return Check(name, True, action())
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [(Path(frame.filename), frame.lineno) for frame in frames]
        own = [
            f"{file.relative_to(ROOT)}:{line}: "
            for file, line in files
            if file.is_relative_to(ROOT / "dsv4")
        ]
        return Check(name, False, own[-1] + str(error).partition("\n")[0])


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Inside, a torch call that waits for a device raises ``RuntimeError``. Kernels launched
    without torch are not seen.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def positions(state: DecodeState) -> list[int]:
    """The host's count and every device's, of all ranks."""
    counts = [count_1 for rank in state.ranks for count_1 in rank.positions_1.values()]
    return [state.position, *map(int, counts)]


def expect_positions(state: DecodeState, expected: list[int]) -> None:
    """Raises ``RuntimeError`` unless ``positions`` are ``expected``."""
    if positions(state) != expected:
        raise RuntimeError(
            f"position: found {positions(state)} on the host and the devices, expected {expected}"
        )


def cache_tensors(state: DecodeState) -> Iterator[tuple[str, Tensor]]:
    """Every cache of a sequence by name; of several ranks those of all."""
    for rank, own in enumerate(state.ranks):
        of_rank = "" if len(state.ranks) == 1 else f"rank {rank} "
        for name, cache in _rank_tensors(own):
            yield of_rank + name, cache


def _rank_tensors(state: DecodeState) -> Iterator[tuple[str, Tensor]]:
    for index, layer in enumerate(state.layers):
        rows = {"window ring": layer.keys.ring}
        for name, part in (("compressed", layer.compressed), ("index", layer.index)):
            if part is not None:
                rows[f"{name} rows"] = part.rows
                yield f"layer {index} {name} ring kv", part.ring.kv
                yield f"layer {index} {name} ring score", part.ring.score
        for name, cache in rows.items():
            yield f"layer {index} {name}", cache.data
            if cache.block_scale is not None:
                yield f"layer {index} {name} scales", cache.block_scale


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, 0 is not −0."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def device_memory(state: DecodeState) -> dict[str, int]:
    """Bytes that torch has allocated and reserved, by device."""
    torch.cuda.synchronize()
    kinds = {"allocated": torch.cuda.memory_allocated, "reserved": torch.cuda.memory_reserved}
    return {
        f"{device} {kind}": count(device)
        for device in state.all_devices
        for kind, count in kinds.items()
    }
