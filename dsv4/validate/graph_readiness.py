"""Is the decode step ready for CUDA graphs? ``python -m dsv4.validate.graph_readiness --help``

First the static scan (``sync_scan``), which needs no GPU; ``--static-only`` ends there. Then, on a checkpoint: a step
that may not wait for the device, the capture of every region, replays against eager steps bit by bit, and memory that
does not grow. Prints a table, writes JSON, and ends with exit code 1 when a check fails.
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from dsv4.bench.provenance import ROOT, provenance
from dsv4.cli.report import write_json
from dsv4.config import EngineConfig
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.decode.captured_step import full_region, split_regions
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.state import DecodeState
from dsv4.validate.sync_scan import scan_tree

# Where the steps begin and how many there are: they complete windows of 4 tokens and, the sixth, one of 128.
START, STEPS = 122, 12
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
    """What the checks of replays need of ``CUDAGraphDecoder``."""

    def replay(self, token_ids: int, position: int) -> Tensor:
        """float32 logits ``[1, V]`` of the step that appends a token at ``position``."""
        ...


@dataclass(frozen=True)
class EagerRun:
    """Eager steps on a fresh sequence: the prompt, one token per step, logits ``[1, V]``, and the caches at the end."""

    prompt: list[int]
    tokens: list[int]
    logits: list[Tensor]
    caches: dict[str, Tensor]

    @classmethod
    def of(cls, engine: Engine) -> "EagerRun":
        """``engine`` must decode eagerly."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.config.vocab_size, (START + STEPS,), generator=generator).tolist()
        prompt, tokens = ids[:START], ids[START:]
        start_sequence(engine, prompt)
        logits = [engine.decode([token]) for token in tokens]
        return cls(prompt, tokens, logits, {name: cache.clone() for name, cache in cache_tensors(engine.state)})


def start_sequence(engine: Engine, prompt: list[int]) -> None:
    """A fresh sequence of ``prompt`` in caches of zeros, so that runs of equal steps leave equal bytes."""
    engine.reset()
    for _, cache in cache_tensors(engine.state):
        cache.zero_()
    engine.prefill(prompt)


def check_sources() -> list[Check]:
    """The static scan: a failed check per finding."""
    name = "static scan"
    passed = Check(name, True, "nothing that makes the host wait in the code of a step")
    return [Check(name, False, str(finding)) for finding in scan_tree()] or [passed]


def check_eager(engine: Engine, run: EagerRun) -> Check:
    """One step, with its choice of a token, in which no torch call may wait for the device."""
    start_sequence(engine, run.prompt)

    def step() -> str:
        engine.ops.argmax_token(engine.decode(run.tokens[:1])[0])
        return "no torch call waits, from the token ids to the choice of the next on the device"

    step()
    with no_synchronization():
        return attempt("eager host", step)


def check_capture(decoder: CUDAGraphDecoder) -> Check:
    """Every layer is captured, and the position is where it was."""

    def capture() -> str:
        before = positions(decoder.state)
        decoder.capture()
        missing = sorted(expected_regions(decoder) - set(decoder.regions))
        if missing:
            raise RuntimeError(f"regions: found {', '.join(decoder.regions)}, expected {', '.join(missing)} as well")
        expect_positions(decoder.state, before)
        return f"{len(decoder.regions)} regions, the position unchanged"

    return attempt(f"{decoder.mode}: capture", capture)


def expected_regions(decoder: CUDAGraphDecoder) -> set[str]:
    """Names of regions that together hold every layer, as far as ``decoder.mode`` captures it, and the head."""
    names = {"head"}
    for segment in decoder.model.segments:
        if decoder.mode == "full":
            names.add(full_region(segment))
        else:
            names |= {name for layer in segment.layers for name in split_regions(layer)}
    return names


def check_replay(mode: str, engine: Engine, decoder: Replayer, run: EagerRun) -> Check:
    """Replays of the eager run's steps give its logits and leave its caches and position, bit for bit; so do the last
    few once more after they were taken back.
    """
    end = START + len(run.tokens)

    def replay() -> str:
        start_sequence(engine, run.prompt)
        for position in [*range(START, end), *range(end - REWOUND, end)]:
            logits_TV, eager_TV = decoder.replay(run.tokens[position - START], position), run.logits[position - START]
            if not same_bits(logits_TV, eager_TV):
                difference = (logits_TV - eager_TV).abs().max()
                raise RuntimeError(f"position {position}: logits differ from the eager ones by up to {difference:.3g}")
        expect_positions(engine.state, [end] * len(positions(engine.state)))
        wrong = [name for name, cache in cache_tensors(engine.state) if not same_bits(cache, run.caches[name])]
        if wrong:
            raise RuntimeError(f"caches: found other bytes than after eager steps in {len(wrong)}, first in {wrong[0]}")
        return f"logits and caches bit for bit at {START} to {end - 1}, the last {REWOUND} again after a rewind"

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
    mode: str, engine: Engine, decoder: Replayer, run: EagerRun, memory: Callable[[], dict[str, int]]
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
            raise RuntimeError(f"bytes: found {after} after {REPLAYS} replays, expected {before} as before them")
        return f"{REPLAYS} replays neither allocate nor reserve a byte"

    return attempt(f"{mode}: memory", replay)


def attempt(name: str, action: Callable[[], str]) -> Check:
    """A passed check with what ``action`` returns, or a failed one with its ``RuntimeError`` and the line of this
    package that led to it.
    """
    try:
        return Check(name, True, action())
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [(Path(frame.filename), frame.lineno) for frame in frames]
        own = [f"{file.relative_to(ROOT)}:{line}: " for file, line in files if file.is_relative_to(ROOT / "dsv4")]
        return Check(name, False, own[-1] + str(error).partition("\n")[0])


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Inside, a torch call that waits for a device raises ``RuntimeError``. Kernels launched without torch are not
    seen.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def positions(state: DecodeState) -> list[int]:
    """The host's count and every device's."""
    return [state.position, *(int(position_1) for position_1 in state.positions_1.values())]


def expect_positions(state: DecodeState, expected: list[int]) -> None:
    """Raises ``RuntimeError`` unless ``positions`` are ``expected``."""
    if positions(state) != expected:
        raise RuntimeError(f"position: found {positions(state)} on the host and the devices, expected {expected}")


def cache_tensors(state: DecodeState) -> Iterator[tuple[str, Tensor]]:
    """Every cache of a sequence by name."""
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
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def device_memory(state: DecodeState) -> dict[str, int]:
    """Bytes that torch has allocated and reserved, by device."""
    torch.cuda.synchronize()
    kinds = {"allocated": torch.cuda.memory_allocated, "reserved": torch.cuda.memory_reserved}
    return {f"{device} {kind}": count(device) for device in state.devices for kind, count in kinds.items()}


def check_checkpoint(model: Path, modes: list[Mode], gpus: int) -> tuple[list[Check], dict[str, list[str]]]:
    """The checks that need a GPU, and the captured regions by mode. Raises ``UserError``."""
    if not torch.cuda.is_available():
        raise UserError("graph_readiness: found no CUDA device, expected one; --static-only does without")
    room = START + STEPS + REPLAYS
    config = EngineConfig(device="cuda", ops="cuda", gpus=gpus, max_context=room, cuda_graph=None)
    return check_engine(Engine.load(model, config), modes)


def check_engine(engine: Engine, modes: list[Mode]) -> tuple[list[Check], dict[str, list[str]]]:
    """The same of an engine without a decoder, with room for all steps."""
    runs: list[EagerRun] = []

    def steps() -> str:
        runs.append(EagerRun.of(engine))
        return f"{STEPS} steps from position {START}"

    checks, regions = [attempt("eager steps", steps)], {}
    if not runs:
        return checks, regions
    checks.append(check_eager(engine, runs[0]))
    for mode in modes:
        engine.reset()
        decoder = CUDAGraphDecoder(engine.model, engine.state, engine.ops, mode, engine.max_context)
        checks.append(check_capture(decoder))
        regions[mode] = [*decoder.regions]
        if checks[-1].passed:
            checks += [
                check_replay(mode, engine, decoder, runs[0]),
                check_replay_waits(mode, engine, decoder, runs[0]),
                check_memory(mode, engine, decoder, runs[0], lambda: device_memory(engine.state)),
            ]
    return checks, regions


def table(checks: list[Check]) -> str:
    """The rows as text."""
    width = max(len(check.name) for check in checks)
    return "\n".join(
        f"{'passed' if check.passed else 'FAILED'}  {check.name:<{width}}  {check.detail}" for check in checks
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m dsv4.validate.graph_readiness``."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.validate.graph_readiness", description=__doc__)
    parser.add_argument("--static-only", action="store_true", help="only the scan of the sources; needs no GPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--mode", choices=get_args(Mode), action="append", help="repeatable (default: all)")
    parser.add_argument("--json", type=Path, help="write the checks and where they come from")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command: 0, 1 when a check fails, 2 for a user error (one line on stderr)."""
    arguments = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(arguments)
    try:
        checks, regions = check_sources(), {}
        if not options.static_only:
            found, regions = check_checkpoint(options.model, options.mode or [*get_args(Mode)], options.gpus)
            checks += found
        print(table(checks))
        if options.json is not None:
            command = " ".join(["python -m dsv4.validate.graph_readiness", *arguments])
            facts: dict[str, Any] = {"model": str(options.model), "regions": regions}
            write_json(options.json, {**provenance(command), **facts, "checks": [asdict(check) for check in checks]})
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
